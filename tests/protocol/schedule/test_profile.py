"""The measured network: what a NETWORK.json may say, how gaps are filled, and which links are doubted."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest

from protocol.base.errors import BadInputError
from protocol.schedule.profile import (
    Link,
    Machine,
    NetworkFile,
    SiteLink,
    build_network,
    load_network,
)

DATA = Path(__file__).parents[2] / "data"


def machine(name: str, role: str = "server", site: str | None = None, uplink: float = 1e9) -> Machine:
    return Machine(
        name=name,
        role=role,  # type: ignore[arg-type]
        forward_flops_per_s=1e13,
        backward_flops_per_s=1e13,
        memory_bytes=10**10,
        uplink_bytes_per_s=uplink,
        downlink_bytes_per_s=1e9,
        site=site,
    )


def link(source: str, target: str, rate: float, latency_s: float = 0.01) -> Link:
    return Link(source=source, target=target, latency_s=latency_s, bytes_per_s=rate)


def test_servers_come_first_and_links_fill_both_directions() -> None:
    """Servers are numbered before volunteers, and a direction nobody measured counts as its reverse."""
    network = build_network(
        NetworkFile(
            kind="network",
            machines=(machine("v", "volunteer"), machine("s"), machine("t")),
            links=(link("v", "s", 5e6), link("s", "t", 2e7), link("t", "s", 4e7)),
        )
    )
    assert [m.name for m in network.machines] == ["s", "t", "v"]
    assert network.to_bytes_per_s[2, 0] == network.from_bytes_per_s[0, 2] == 5e6
    assert network.to_bytes_per_s[0, 1] == 2e7
    assert network.to_bytes_per_s[1, 0] == 4e7


def test_uplink_caps_every_link_and_unmeasured_pairs_are_unreachable() -> None:
    """No link is faster than its sender's uplink, and a pair that nobody knows takes for ever."""
    network = build_network(
        NetworkFile(
            kind="network",
            machines=(machine("s"), machine("t"), machine("v", "volunteer", uplink=1e6)),
            links=(link("v", "s", 5e6),),
        )
    )
    assert network.to_bytes_per_s[2, 0] == 1e6
    to_s, _ = network.transfer_s(1e6)
    assert to_s[2, 0] == pytest.approx(1.01)
    assert math.isinf(to_s[2, 1]) and math.isinf(network.to_latency_s[0, 1])


def test_site_table_fills_pairs_nobody_measured() -> None:
    """Two sites' entry stands in for every unmeasured pair of them, both ways; a measured link wins."""
    network = build_network(
        NetworkFile(
            kind="network",
            machines=(machine("s", site="x"), machine("t", site="y"), machine("u", site="x")),
            sites=(
                SiteLink(a="x", b="y", latency_s=0.05, bytes_per_s=1e7),
                SiteLink(a="x", b="x", latency_s=0.001, bytes_per_s=5e8),
            ),
            links=(link("s", "t", 3e6),),
        )
    )
    assert network.to_bytes_per_s[2, 1] == network.from_bytes_per_s[1, 2] == 1e7
    assert network.to_bytes_per_s[0, 1] == 3e6 and network.to_bytes_per_s[0, 2] == 5e8


def region_file(slow: tuple[str, str] | None, factor: float) -> NetworkFile:
    """The published region table as one server per location, with one entry wrong by `factor`."""
    rows = list(csv.DictReader((DATA / "skippipe_v1_regions.csv").read_text().splitlines()))
    places = sorted({row["a"] for row in rows} | {row["b"] for row in rows})
    sites = []
    for row in rows:
        rate = float(row["bandwidth_as_written"]) * 1e8 * (factor if (row["a"], row["b"]) == slow else 1)
        latency_s = float(row["latency_ms"]) / 1e3
        sites.append(SiteLink(a=row["a"], b=row["b"], latency_s=latency_s, bytes_per_s=rate))
    return NetworkFile(kind="network", machines=tuple(machine(p, site=p) for p in places), sites=tuple(sites))


def test_published_region_table_has_no_outlier() -> None:
    """Honest intercontinental differences are not doubted."""
    assert build_network(region_file(None, 1)).outliers == ()


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_link_hundred_times_off_is_reported(factor: float) -> None:
    """A typo of two decimals is named; too slow is used as it stands, too fast at its neighbours' median."""
    network = build_network(region_file(("Oregon", "Tokyo"), factor))
    assert len(network.outliers) == 1
    outlier = network.outliers[0]
    assert {outlier.source, outlier.target} == {"Oregon", "Tokyo"}
    assert (outlier.used == outlier.measured) == (factor < 1)
    assert "Oregon" in str(outlier) and "times off" in str(outlier)


def test_link_off_its_twins_between_the_same_sites_is_reported() -> None:
    """Between two sites with many links, one link ten times off the others is named, its latency too."""
    machines = tuple(machine(f"{site}{i}", site=site) for site in "xy" for i in range(3))
    links = [link(f"x{i}", f"y{j}", 1e7 * (1 + 0.1 * i)) for i in range(3) for j in range(3)]
    links[4] = link("x1", "y1", 5e5, latency_s=0.2)
    network = build_network(NetworkFile(kind="network", machines=machines, links=tuple(links)))
    assert [(o.source, o.target, o.quantity) for o in network.outliers] == [
        ("x1", "y1", "latency_s"),
        ("x1", "y1", "bytes_per_s"),
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machines": []}, "machines"),
        ({"links": [{"source": "s", "target": "?", "latency_s": 0, "bytes_per_s": 1}]}, "target"),
        ({"links": [{"source": "v", "target": "w", "latency_s": 0, "bytes_per_s": 1}]}, "only to servers"),
        ({"links": [{"source": "s", "target": "v", "latency_s": -1, "bytes_per_s": 1}]}, "latency_s"),
        (
            {"links": [{"source": "s", "target": "v", "latency_s": 0, "bytes_per_s": float("nan")}]},
            "bytes_per_s",
        ),
        ({"extra": 1}, "extra"),
        ({"kind": "routes"}, "kind"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, change: dict[str, object], says: str) -> None:
    """A file that cannot be is refused with a sentence that names the file and the key."""
    one = {
        "forward_flops_per_s": 1,
        "backward_flops_per_s": 1,
        "memory_bytes": 1,
        "uplink_bytes_per_s": 1,
        "downlink_bytes_per_s": 1,
    }
    machines = [{"name": n, "role": r, **one} for n, r in (("s", "server"), ("v", "volunteer"), ("w", "volunteer"))]
    path = tmp_path / "net.json"
    path.write_text(json.dumps({"kind": "network", "machines": machines} | change))
    with pytest.raises(BadInputError, match=says) as caught:
        load_network(path)
    assert "net.json" in str(caught.value)


def test_one_machine_is_a_network() -> None:
    """The smallest network builds, and a machine reaches itself for nothing."""
    network = build_network(NetworkFile(kind="network", machines=(machine("s"),)))
    assert (network.servers, network.volunteers) == (1, 0)
    assert np.all(network.transfer_s(0)[0] == 0)

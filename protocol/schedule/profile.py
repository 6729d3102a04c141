"""The measured network: who there is, what each machine can do, and how fast each link is.

`NETWORK.json` is one JSON object; unknown keys, wrong types, negative or non-finite numbers are refused by
name.

    {"kind": "network",
     "machines": [{"name": "ams-1", "role": "server", "site": "ams", "memory_bytes": 24000000000,
                   "forward_flops_per_s": 8e13, "backward_flops_per_s": 8e13,
                   "uplink_bytes_per_s": 1.2e8, "downlink_bytes_per_s": 1.2e8, "age_s": 30, "spread": 0.1},
                   …],
     "links":    [{"source": "ams-1", "target": "sof-2", "latency_s": 0.02, "bytes_per_s": 4e7,
                   "age_s": 12, "spread": 0.2}, …],
     "sites":    [{"a": "ams", "b": "sof", "latency_s": 0.019, "bytes_per_s": 4e7}, …]}

`role` is `server` (promised to stay up) or `volunteer`. `site` may be absent. `age_s` is how old the
measurement is and `spread` its relative spread (median absolute deviation over median); both default to 0.
`uplink_bytes_per_s` and `downlink_bytes_per_s` are what all transfers of a machine share. A link is one
direction; where the other direction was not measured it counts as equal. A pair that nobody measured takes
the entry of its two sites in `sites` (`a` = `b` for inside a site); without one it is unreachable.
Volunteers talk only to servers, so links between volunteers are refused. No link is faster than its sender's
uplink or its receiver's downlink.

A value ten times off its neighbours is listed in `Network.outliers`. A link that looks too slow is used as
measured (the planner then avoids it); one that looks too fast is used at its neighbours' median, so that a
slip of the pen never attracts traffic. Either way the report says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.base.errors import BadInputError

MACHINES_MAX = 20_000
LINKS_MAX = 4_000_000
NAME_CHARS_MAX = 128
FILE_BYTES_MAX = 1 << 30
OUTLIER_FACTOR = 10.0
NEIGHBOURS_MIN = 3
LOCAL_BYTES_PER_S = 1e12

Floats = NDArray[np.float64]


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine as measured. Power is per operation, in floating-point operations per second."""

    name: str
    role: Literal["server", "volunteer"]
    forward_flops_per_s: float
    backward_flops_per_s: float
    memory_bytes: int
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    site: str | None = None
    age_s: float = 0.0
    spread: float = 0.0


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of one pair, as measured by an otherwise idle probe."""

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    age_s: float = 0.0
    spread: float = 0.0


class SiteLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to assume between two sites (or inside one) for pairs that nobody measured."""

    a: str
    b: str
    latency_s: float
    bytes_per_s: float


class NetworkFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a `NETWORK.json`; see the module's docstring."""

    kind: Literal["network"]
    machines: tuple[Machine, ...]
    links: tuple[Link, ...] = ()
    sites: tuple[SiteLink, ...] = ()


@dataclass(frozen=True)
class Outlier:
    """A link or site pair whose value is `OUTLIER_FACTOR` off its neighbours, and what is used instead."""

    source: str
    target: str
    quantity: Literal["latency_s", "bytes_per_s"]
    measured: float
    expected: float
    used: float

    def __str__(self) -> str:
        times = max(self.measured / self.expected, self.expected / max(self.measured, 1e-300))
        kept = "used as measured" if self.used == self.measured else f"{self.used:.4g} used instead"
        return (
            f"{self.source} -> {self.target}: {self.quantity} {self.measured:.4g} is {times:.0f} times off "
            f"its neighbours ({self.expected:.4g}); {kept}"
        )


@dataclass(frozen=True)
class Network:
    """Machines (servers first, each group in the file's order) and their links with the servers.

    With S servers and n machines, `to_*[i, j]` is from machine i to server j, shape (n, S), and `from_*[j,
    i]` is from server j to machine i, shape (S, n). Unreachable: latency infinite, 0 bytes per second.
    """

    machines: tuple[Machine, ...]
    servers: int
    to_latency_s: Floats
    to_bytes_per_s: Floats
    from_latency_s: Floats
    from_bytes_per_s: Floats
    outliers: tuple[Outlier, ...] = ()
    oldest_s: float = 0.0
    widest_spread: float = 0.0

    @property
    def volunteers(self) -> int:
        return len(self.machines) - self.servers

    def transfer_s(self, size_bytes: float) -> tuple[Floats, Floats]:
        """Seconds for `size_bytes` to each server and from each server, alone on the link: (n, S) and (S,
        n).
        """
        with np.errstate(divide="ignore"):
            return (
                self.to_latency_s + size_bytes / self.to_bytes_per_s,
                self.from_latency_s + size_bytes / self.from_bytes_per_s,
            )


def load_network(path: Path) -> Network:
    """Reads a `NETWORK.json`. Raises `BadInputError` with the file's name and the key."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise BadInputError(f"{path.name}: larger than {FILE_BYTES_MAX} bytes")
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path.name}: not JSON: {error}") from error
    try:
        return build_network(msgspec.convert(raw, NetworkFile))
    except (msgspec.ValidationError, BadInputError) as error:
        raise BadInputError(f"{path.name}: {error}") from error


@dataclass(frozen=True)
class LinkReport:
    """One probe of one direction, reported by a machine at `measured_at_s` (coordinator's clock)."""

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    measured_at_s: float


def build_network(file: NetworkFile) -> Network:
    """Checks a file's content and fills the matrices. Raises `BadInputError` naming the key."""
    _check(file)
    machines = tuple(sorted(file.machines, key=lambda machine: machine.role != "server"))
    servers = sum(machine.role == "server" for machine in machines)
    index = {machine.name: number for number, machine in enumerate(machines)}
    place = [machine.site if machine.site is not None else f"\0{machine.name}" for machine in machines]
    links, link_outliers = _screen(
        [(link.source, link.target, place[index[link.source]], place[index[link.target]], link) for link in file.links]
    )
    both_ways = [(s.a, s.b, s.a, s.b, s) for s in file.sites] + [(s.b, s.a, s.b, s.a, s) for s in file.sites]
    site_links, site_outliers = _screen(both_ways)
    to_latency, to_rate, from_latency, from_rate = _from_sites(machines, servers, site_links)
    for reverse in (True, False):  # measured directions last, so that they overwrite an assumed reverse
        for (source, target), (latency_s, bytes_per_s) in links.items():
            i, j = (index[target], index[source]) if reverse else (index[source], index[target])
            if reverse and (target, source) in links:
                continue
            if j < servers:
                to_latency[i, j], to_rate[i, j] = latency_s, bytes_per_s
            if i < servers:
                from_latency[i, j], from_rate[i, j] = latency_s, bytes_per_s
    up = np.array([machine.uplink_bytes_per_s for machine in machines], dtype=np.float64)
    down = np.array([machine.downlink_bytes_per_s for machine in machines], dtype=np.float64)
    to_rate = np.minimum(to_rate, np.minimum(up[:, None], down[None, :servers]))
    from_rate = np.minimum(from_rate, np.minimum(up[:servers, None], down[None, :]))
    for number in range(servers):  # a machine reaches itself for almost nothing
        for latency, rate in ((to_latency, to_rate), (from_latency, from_rate)):
            latency[number, number], rate[number, number] = 0.0, LOCAL_BYTES_PER_S
    to_latency[to_rate == 0] = math.inf
    from_latency[from_rate == 0] = math.inf
    return Network(
        machines,
        servers,
        to_latency,
        to_rate,
        from_latency,
        from_rate,
        tuple(link_outliers + [outlier for outlier in site_outliers if outlier.source <= outlier.target]),
        max([machine.age_s for machine in machines] + [link.age_s for link in file.links]),
        max([machine.spread for machine in machines] + [link.spread for link in file.links]),
    )


def _check(file: NetworkFile) -> None:
    if not file.machines:
        raise BadInputError("machines: a network needs at least one machine")
    for key, count, most in (
        ("machines", len(file.machines), MACHINES_MAX),
        ("links", len(file.links), LINKS_MAX),
        ("sites", len(file.sites), LINKS_MAX),
    ):
        if count > most:
            raise BadInputError(f"{key}: {count} entries, at most {most} are read")
    role: dict[str, str] = {}
    for number, machine in enumerate(file.machines):
        where = f"machines[{number}]"
        if not 0 < len(machine.name) <= NAME_CHARS_MAX or "\0" in machine.name + (machine.site or ""):
            raise BadInputError(f"{where}.name: must be 1 to {NAME_CHARS_MAX} characters without a zero byte")
        if machine.name in role:
            raise BadInputError(f"{where}.name: {machine.name!r} stands twice")
        role[machine.name] = machine.role
        _numbers(where, machine)
        if machine.forward_flops_per_s <= 0 or machine.backward_flops_per_s <= 0:
            raise BadInputError(f"{where}.forward_flops_per_s, backward_flops_per_s: must be above 0")
    for number, link in enumerate(file.links):
        where = f"links[{number}]"
        for key, name in (("source", link.source), ("target", link.target)):
            if name not in role:
                raise BadInputError(f"{where}.{key}: no machine is called {name!r}")
        if role[link.source] == role[link.target] == "volunteer":
            raise BadInputError(f"{where}: volunteers talk only to servers, not to each other")
        if link.source == link.target:
            raise BadInputError(f"{where}: {link.source!r} is linked to itself")
        _numbers(where, link)
    for number, site in enumerate(file.sites):
        _numbers(f"sites[{number}]", site)


def _numbers(where: str, item: Machine | Link | SiteLink) -> None:
    for key in item.__struct_fields__:
        value = getattr(item, key)
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise BadInputError(f"{where}.{key}: {value} is not a finite number of at least 0")


QUANTITIES: tuple[Literal["latency_s", "bytes_per_s"], ...] = ("latency_s", "bytes_per_s")
Screened = dict[tuple[str, str], tuple[float, float]]


def _screen(entries: Sequence[tuple[str, str, str, str, Any]]) -> tuple[Screened, list[Outlier]]:
    """(source, target) -> (latency_s, bytes_per_s) to use, and the outliers among `entries`.

    Each entry is (source, target, site of source, site of target, item with `latency_s` and `bytes_per_s`).
    Its neighbours are the other entries between the same two sites where there are enough of them, else the
    entries that leave the one site and those that reach the other.
    """
    pairs: dict[tuple[str, str], list[Any]] = {}
    leaving: dict[str, list[Any]] = {}
    reaching: dict[str, list[Any]] = {}
    inside: list[Any] = []
    for _, _, from_site, to_site, item in entries:
        pairs.setdefault((from_site, to_site), []).append(item)
        if from_site == to_site:
            inside.append(item)
        else:
            leaving.setdefault(from_site, []).append(item)
            reaching.setdefault(to_site, []).append(item)
    middles: dict[tuple[int, str], tuple[float, int]] = {}

    def middle(group: list[Any], quantity: str) -> tuple[float, int]:
        key = (id(group), quantity)
        if key not in middles:
            middles[key] = (median(getattr(item, quantity) for item in group), len(group))
        return middles[key]

    used: Screened = {}
    outliers: list[Outlier] = []
    for source, target, from_site, to_site, item in entries:
        same = pairs[from_site, to_site]
        if len(same) > NEIGHBOURS_MIN:
            groups = [same]
        elif from_site == to_site:
            groups = [inside]
        else:
            groups = [leaving[from_site], reaching[to_site]]
        values = {"latency_s": item.latency_s, "bytes_per_s": item.bytes_per_s}
        for quantity in QUANTITIES:
            found = [middle(group, quantity) for group in groups]
            if min(count for _, count in found) <= NEIGHBOURS_MIN:
                continue
            measured = values[quantity]
            low, high = min(value for value, _ in found), max(value for value, _ in found)
            if low <= 0:
                continue
            expected = low if measured < low else high
            too_low, too_high = measured * OUTLIER_FACTOR <= low, measured >= OUTLIER_FACTOR * high
            if quantity == "latency_s" and groups[0] is not same:
                too_low = False  # a near site is no slip of the pen
            if too_low or too_high:
                fast = too_low if quantity == "latency_s" else too_high
                values[quantity] = expected if fast else measured
                outliers.append(Outlier(source, target, quantity, measured, expected, values[quantity]))
        used[source, target] = (values["latency_s"], values["bytes_per_s"])
    return used, outliers


def _from_sites(
    machines: tuple[Machine, ...], servers: int, site_links: Screened
) -> tuple[Floats, Floats, Floats, Floats]:
    """The four matrices of `Network` as the site table alone gives them; unreachable where it is silent."""
    # Between volunteers there are no links: a table of all sites by all sites would take gigabytes for 10,000 homes.
    number = _numbered(machines)
    near = _numbered(machines[:servers])
    site = np.array([number.get(machine.site, len(number)) for machine in machines])
    server_site = np.array([near.get(machine.site, len(near)) for machine in machines[:servers]], dtype=np.int64)
    to_latency = np.full((len(number) + 1, len(near) + 1), math.inf)
    from_latency = to_latency.T.copy()
    to_rate, from_rate = np.zeros(to_latency.shape), np.zeros(from_latency.shape)
    for (a, b), (latency_s, bytes_per_s) in site_links.items():
        if a in number and b in near:
            to_latency[number[a], near[b]], to_rate[number[a], near[b]] = latency_s, bytes_per_s
        if a in near and b in number:
            from_latency[near[a], number[b]], from_rate[near[a], number[b]] = latency_s, bytes_per_s
    to, back = np.ix_(site, server_site), np.ix_(server_site, site)
    return to_latency[to], to_rate[to], from_latency[back], from_rate[back]


def _numbered(machines: Sequence[Machine]) -> dict[str | None, int]:
    """The sites of these machines, by name."""
    names = sorted({machine.site for machine in machines if machine.site is not None})
    return {name: position for position, name in enumerate(names)}

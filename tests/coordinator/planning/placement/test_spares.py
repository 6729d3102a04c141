"""More servers never make a plan slower: those that would are left out as spares."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from coordinator.commands.plan import plan
from coordinator.planning.placement.run_plan import plan_run, sizes_of
from coordinator.planning.placement.search import search_placement
from coordinator.planning.placement.swarm import world_of
from protocol.run.run import BatchSection, ModelSection, RunConfig, WireSection
from protocol.schedule.profile import Link, Machine, Network, NetworkFile, build_network

TWO_SITES = Path(__file__).parents[3] / "data" / "network_two_sites.json"


def without(file: NetworkFile, *gone: str) -> NetworkFile:
    return msgspec.structs.replace(
        file,
        machines=tuple(machine for machine in file.machines if machine.name not in gone),
        links=tuple(link for link in file.links if not {link.source, link.target} & set(gone)),
    )


def test_slow_homes_among_fast_servers_become_spares() -> None:
    """Two servers on slow lines beside six on fast ones: the plan is as fast as without the two."""
    file = slow_homes()
    everybody = plan_run(RunConfig(), build_network(file), budget_s=1.0)
    fast = plan_run(RunConfig(), build_network(without(file, "home-0", "home-1")), budget_s=1.0)
    assert everybody.tokens_per_s >= fast.tokens_per_s * (1 - 1e-9)
    assert {6, 7} <= set(everybody.found.spares)
    assert everybody.found.lower_bound_s <= everybody.step_s


def slow_homes() -> NetworkFile:
    """Two sites and two servers at homes with a hundredth of the line that the file has."""
    file = msgspec.json.decode(TWO_SITES.read_bytes(), type=NetworkFile)
    return msgspec.structs.replace(
        file,
        machines=tuple(
            msgspec.structs.replace(machine, uplink_bytes_per_s=machine.uplink_bytes_per_s / 100)
            if machine.name in ("home-0", "home-1")
            else machine
            for machine in file.machines
        ),
    )


def random_network(rng: random.Random) -> Network:
    """Three to six servers and up to four volunteers on links as different as links are."""
    machines = [
        Machine(
            name=f"{role}-{number}",
            role=role,  # type: ignore[arg-type]
            forward_flops_per_s=10 ** rng.uniform(9, 13),
            backward_flops_per_s=10 ** rng.uniform(9, 13),
            memory_bytes=10**10,
            uplink_bytes_per_s=rng.choice([1e6, 1e8]),
            downlink_bytes_per_s=rng.choice([1e6, 1e8]),
        )
        for role, count in (("server", rng.randint(3, 6)), ("volunteer", rng.randint(0, 4)))
        for number in range(count)
    ]
    links = [
        Link(source=a.name, target=b.name, latency_s=rng.uniform(0, 0.2), bytes_per_s=10 ** rng.uniform(5, 9))
        for a in machines
        for b in machines
        if a.name != b.name and b.role == "server"
    ]
    return build_network(NetworkFile(kind="network", machines=tuple(machines), links=tuple(links)))


def test_people_read_eight_characters_of_a_node_id_within_eighty_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network as a run measured it: ids are cut like in `status`, and neither table nor route is wrapped or cut."""
    text = TWO_SITES.read_text()
    ids = {}
    for number, name in enumerate(["home-0", "home-1", "cloud-0", "cloud-1", "cloud-2", "campus-0", "home-2"]):
        ids[name] = "abcdefg"[number] * 4 + "k7x2" * 12
        text = text.replace(f'"{name}"', f'"{ids[name]}"')
    network, run = tmp_path / "network.json", tmp_path / "RUN.toml"
    network.write_text(text)
    run.write_text("")
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["run", str(run), str(network), "--stages", "3", "--skip", "1/3", "--budget-s", "0.5"]
    printed = CliRunner().invoke(plan, arguments, catch_exceptions=False).output
    assert any(node_id[:8] in printed for node_id in ids.values())
    assert not any(node_id[:9] in printed for node_id in ids.values())
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    routes = [line for line in printed.splitlines() if line.count(" > ") == 2]
    assert len(routes) == 4  # two routes of two stages, a line for each hop
    problem = TWO_SITES.parent / "problems" / "placement_6.json"
    printed = CliRunner().invoke(plan, ["placement", str(problem), "--budget-s", "0.2"]).output
    assert "…" not in printed and "volunteers" in printed
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_one_more_server_never_makes_the_plan_slower(seed: int) -> None:
    """The first two servers of a random network, then one more at a time: the batch never takes longer."""
    rng = random.Random(seed)
    config = RunConfig(
        model=ModelSection(layers=rng.randint(2, 8)),
        batch=BatchSection(microbatches=rng.randint(2, 12), samples=8),
        wire=WireSection(gradients="fp32"),
    )
    world = world_of(random_network(rng), sizes_of(config))
    before_s = float("inf")
    for servers in range(2, world.servers + 1):
        part = world.part(range(servers), range(world.volunteers))
        found = search_placement(part, 0, 0.6, clock=lambda: 0.0)
        assert found.lower_bound_s <= found.batch_s <= before_s * (1 + 1e-9)
        placed = {j for stage in found.placement.stages for j in stage.servers}
        assert placed | set(found.spares) == set(range(servers)) and not placed & set(found.spares)
        before_s = found.batch_s


def test_the_printed_plan_names_the_spares(tmp_path: Path) -> None:
    """`plan run` says which servers it left out, and on how many of them the stages stand."""
    run = tmp_path / "RUN.toml"
    run.write_text("")
    network = tmp_path / "NETWORK.json"
    network.write_bytes(msgspec.json.encode(slow_homes()))
    text = CliRunner().invoke(plan, ["run", str(run), str(network), "--budget-s", "1"]).output
    assert "of 8 servers" in text
    spares = text.split("spare  ")[1].splitlines()[1].split()
    assert {"home-0", "home-1"} <= set(spares)

"""What a run's nodes do first and how much is in flight, as the planner finds it by simulating the run."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.live.plan_builder import in_flight_of
from coordinator.planning.placement.pools import Pools
from coordinator.planning.placement.run_sizes import pool_sizes
from coordinator.planning.placement.seat_search import even_seats
from coordinator.planning.placement.seats import Seats
from coordinator.planning.tune.live_order import LiveChoice, choose_live, words_of
from protocol.run.plan import IN_FLIGHT_LIMIT
from protocol.run.run import RunConfig
from protocol.schedule.live import followed_live
from protocol.schedule.policies import First, Policy
from protocol.schedule.profile import NetworkFile, build_network
from tests.coordinator.planning.placement.test_seats import SHAPES, network, run


def found(config: RunConfig, file: NetworkFile, tuned: bool = True) -> LiveChoice:
    config = config.settled(config.stages.count or 2)
    seats = Seats(Pools(build_network(file), pool_sizes(config)), config)
    return choose_live(seats, even_seats(seats), in_flight_of(seats.count), tuned)


def of_batch(config: RunConfig, microbatches: int) -> RunConfig:
    return msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, microbatches=microbatches))


def with_devices(file: NetworkFile, slower: float) -> NetworkFile:
    machines = tuple(
        msgspec.structs.replace(
            machine,
            forward_flops_per_s=machine.forward_flops_per_s / slower,
            backward_flops_per_s=machine.backward_flops_per_s / slower,
        )
        for machine in file.machines
    )
    return msgspec.structs.replace(file, machines=machines)


def with_latency(file: NetworkFile, seconds: float) -> NetworkFile:
    links = tuple(msgspec.structs.replace(link, latency_s=seconds) for link in file.links)
    return msgspec.structs.replace(file, links=links)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_for_every_shape_there_is_an_order_that_nodes_follow(shape: str) -> None:
    """With volunteers and without; the answer is always the same, and as much is in flight as by the rule, or more."""
    for volunteers in (0, 6):
        file = network(9, volunteers, 3)
        if volunteers == 0 and SHAPES[shape].stages.collocated == "never":
            continue
        answer = found(SHAPES[shape], file)
        assert answer == found(SHAPES[shape], file)
        assert answer.policy == followed_live(answer.policy), "what is chosen is what is done"
        assert in_flight_of(SHAPES[shape].stages.count or 2) <= answer.in_flight_max <= IN_FLIGHT_LIMIT
        assert "simulated" in answer.reason


def test_backwards_go_first_where_nothing_else_is_faster() -> None:
    """A line of stages with one part each, whose devices set the pace: the usual order, with what was compared."""
    answer = found(of_batch(run(count=4, delay=0), 8), with_devices(network(9, 5, 2), 300))
    assert answer.policy == Policy()
    assert answer.reason.startswith("nodes do backwards first: simulated, nothing else is faster by 1% (")


def test_another_order_is_chosen_where_it_is_faster() -> None:
    """Two parts a stage, 16 microbatches, no delay: forwards first fill the pipeline, and the sentence says by what."""
    answer = found(of_batch(run(count=3, chunks=2, placement="v", delay=0), 16), with_devices(network(9, 5, 2), 100))
    assert answer.policy.first is First.FORWARD
    assert (
        f"nodes do {words_of(answer.policy)}: 9" in answer.reason
        and "% of the time of backwards first" in answer.reason
    )


def test_what_a_file_says_of_the_order_stays() -> None:
    """Only the latency is looked at."""
    config = run(count=3, order="interleaved")
    assert found(config, network(9, 6, 3), tuned=False).policy == Policy(first=First.INTERLEAVED)
    assert "nodes do" not in found(config, network(9, 6, 3), tuned=False).reason


def test_more_is_in_flight_over_lines_with_latency() -> None:
    """A satellite's half second each way, and next to none: the rule's number for the one, more for the other."""
    config = of_batch(run(count=2, order="backward"), 64)
    near = found(config, with_latency(network(5, 4, 1), 0.0002), tuned=False)
    far = found(config, with_latency(network(5, 4, 1), 0.5), tuned=False)
    assert near == LiveChoice(Policy(), in_flight_of(2), "")
    assert in_flight_of(2) < far.in_flight_max <= IN_FLIGHT_LIMIT
    assert far.reason.startswith(f"{far.in_flight_max} forwards in flight, as the ways between members alone take")


def test_nobody_is_asked_for_more_than_devices_hold() -> None:
    """Where two graphs fit into a device, more in flight would be faster nowhere, so the rule's number stays."""
    config = of_batch(run(count=2, order="backward"), 64)
    file = with_latency(network(5, 4, 1), 0.5)
    pools = Pools(build_network(file), pool_sizes(config))
    seats = Seats(pools, config.settled(2))
    pools.memory[pools.servers :] = 0.6 * pools.sizes.held_bytes * float(pools.sizes.parameters[-1])
    assert choose_live(seats, even_seats(seats), in_flight_of(2), False).in_flight_max == in_flight_of(2)

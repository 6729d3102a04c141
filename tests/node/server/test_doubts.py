"""An absurd contribution decides no step: it is done again, and whoever fails the recomputation is blamed."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from node.machine.jobs import Measure
from node.machine.records import ContributionAccepted, ContributionStored
from node.process.screening import square_norm
from node.server.buddy import BuddyRole, Copies
from node.server.conduct import Conduct
from node.server.doubts import GRADIENT_FIRST_MAX, REPEATS_MAX, Doubts
from node.server.ledger import LedgerRole
from node.server.shard import ShardRole
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.messages import Contribute, StepOpened, Stored, Verdict
from tests.node.setting import (
    ELEMENTS,
    VOLUNTEER,
    Effects,
    backward,
    contribution,
    make_config,
    make_context,
    part,
    stored,
)

OTHER, THIRD = NodeId("v2"), NodeId("v3")


def result(number: int, node: NodeId = VOLUNTEER, step: int = 0, loss: float | None = None) -> Stored:
    """A contribution of one task; with a loss, of a route's end."""
    tasks: tuple[TaskId, ...] = (backward(step, 0),)
    if loss is not None:
        tasks = (TaskId(step, 0, 1, "L"), *tasks)
    losses = () if loss is None else (loss,)
    return msgspec.structs.replace(
        stored(number, step, tasks, 0), contribution=contribution(number, node), losses=losses
    )


def usual(count: int = 20, size: float = 1.0, loss: float | None = None) -> Doubts:
    """Doubts that have seen contributions of this size."""
    doubts = Doubts(loss_tokens=1)
    for number in range(count):
        assert doubts.look(result(number, loss=loss), size**2, False) == ""
        assert doubts.accepted(result(number, loss=loss), size**2) == ()
    return doubts


@pytest.mark.parametrize("size", [1e3, 1e100, math.inf])
def test_an_absurd_gradient_waits_for_a_second_opinion(size: float) -> None:
    """Somebody else's usual result shows that it was false; the like of it shows that the run is like that."""
    doubts = usual()
    assert "beyond" in doubts.look(result(50), size**2, False)
    assert doubts.look(result(51, OTHER), 1.5, False) == ""
    assert doubts.accepted(result(51, OTHER), 1.5) == (VOLUNTEER,)
    doubts = usual()
    assert doubts.look(result(50), size**2, False)
    assert doubts.look(result(51, OTHER), (1.1 * size) ** 2, False) == ""
    assert doubts.accepted(result(51, OTHER), (1.1 * size) ** 2) == ()


def test_two_liars_who_do_not_agree_are_both_doubted() -> None:
    """The third brings what is usual: both are blamed."""
    doubts = usual()
    assert doubts.look(result(50), 1e100, False) and doubts.look(result(51, OTHER), 1e40, False)
    assert doubts.accepted(result(52, THIRD), 1.0) == (VOLUNTEER, OTHER)


def test_a_server_of_the_stage_is_believed() -> None:
    """Its result counts, absurd or not, and is what others are measured by."""
    doubts = usual()
    assert doubts.look(result(50), 1e100, False)
    assert doubts.look(result(51, OTHER), 1e60, True) == ""
    assert doubts.accepted(result(51, OTHER), 1e60) == (VOLUNTEER,)


@pytest.mark.parametrize("size", [1e3, math.inf])
def test_where_servers_compute_no_member_confirms_another(size: float) -> None:
    """However many bring the like, and however often: a server's opinion comes first, and shows who lied, or nobody."""
    for of_server, blamed in ((1.0, (VOLUNTEER, OTHER, THIRD, VOLUNTEER)), (1.1 * size, ())):
        doubts = usual()
        for number, node in enumerate((VOLUNTEER, OTHER, THIRD, VOLUNTEER)):
            assert "beyond" in doubts.look(result(50 + number, node), size**2, False, servers_judge=True)
        server = result(60, NodeId("f0"))
        assert doubts.look(server, of_server**2, True, servers_judge=True) == ""
        assert doubts.accepted(server, of_server**2) == tuple(dict.fromkeys(blamed))


def test_who_is_alone_is_believed_at_last() -> None:
    """Nobody else does the work: the second time it counts, and nobody is blamed."""
    doubts = usual()
    answers = [doubts.look(result(50 + turn), 1e100, False) for turn in range(REPEATS_MAX)]
    assert all(answers[:-1]) and answers[-1] == ""
    assert doubts.accepted(result(60), 1e100) == ()


@pytest.mark.parametrize("loss", [0.0, 1e-3, 1e6, 1.7e308, math.nan, -1.0])
def test_a_claimed_loss_is_bounded(loss: float) -> None:
    """A loss far from the others', above or below, is not taken for granted."""
    assert usual(loss=5.0).look(result(50, loss=loss), 1.0, False)


def test_what_a_young_run_gives_is_not_absurd() -> None:
    """Before anything is known only what no model gives is doubted."""
    doubts = Doubts(loss_tokens=1)
    assert doubts.look(result(1, loss=11.0), (0.1 * GRADIENT_FIRST_MAX) ** 2, False) == ""
    assert doubts.look(result(2), (10 * GRADIENT_FIRST_MAX) ** 2, False)
    assert Doubts(1).look(result(3), math.inf, False)


def test_a_run_that_grows_is_followed() -> None:
    """Gradients that double every few steps are never doubted, nor those that are not measured."""
    doubts = usual()
    for number in range(200):
        size = 1.03**number
        assert doubts.look(result(number), size**2, False) == "" and doubts.accepted(result(number), size**2) == ()
    assert doubts.look(result(1), 0.0, False) == ""


def sum_of(number: int, tasks: int, node: NodeId = VOLUNTEER, first: int = 0) -> Stored:
    """A contribution of so many tasks."""
    return msgspec.structs.replace(result(number, node), tasks=tuple(backward(0, first + i) for i in range(tasks)))


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_sums_of_one_task_and_of_hundreds_are_measured_alike(power: float) -> None:
    """Whether gradients are all noise (their sum grows by the root) or agree: nobody is doubted for how many tasks he
    did, beside others who did more or fewer."""
    for usual_tasks, tasks in ((256, 1), (1, 256), (16, 64)):
        doubts = Doubts(loss_tokens=1)
        for number in range(20):
            assert doubts.accepted(sum_of(number, usual_tasks), usual_tasks ** (2 * power)) == ()
        assert doubts.look(sum_of(50, tasks), (3.0 * tasks**power) ** 2, False) == ""
        assert doubts.look(sum_of(51, usual_tasks), (11.0 * usual_tasks**power) ** 2, False)


def test_a_sum_is_false_when_all_of_its_tasks_have_come_out_usual() -> None:
    """Half of them proves nothing, since the other half may have been what was so large; and if it was, nobody lied."""
    for last, blamed in ((16.0, (VOLUNTEER,)), (1e6, ())):
        doubts = Doubts(loss_tokens=1)
        for number in range(20):
            doubts.accepted(sum_of(number, 16), 16.0)
        assert doubts.look(sum_of(50, 32), 1e6, False)
        assert doubts.accepted(sum_of(51, 16, OTHER), 16.0) == ()
        assert doubts.accepted(sum_of(52, 16, OTHER, first=16), last) == blamed


def test_the_ledger_voids_the_contribution_and_not_the_step() -> None:
    """Its tasks are open again, everybody hears who is doubted; the next result counts and names who was false."""
    context = make_context("f0", make_config())
    ledger = LedgerRole(context)
    ledger.on_step_opened(StepOpened(ledger_generation=1, step=0, closed=-1))
    Effects(context.out)
    bad, good = result(1), result(2, OTHER)
    for shard in (0, 1):
        ledger.on_stored(msgspec.structs.replace(bad, shard=shard, square_norm=1e200 if shard else math.inf))
    effects = Effects(context.out)
    assert effects.records(ContributionAccepted) == []
    (verdict,) = effects.sent(Verdict, VOLUNTEER)
    assert verdict.doubted and not verdict.accepted and "beyond" in verdict.reason
    for shard in (0, 1):
        ledger.on_stored(msgspec.structs.replace(good, shard=shard, square_norm=1.0))
    (record,) = Effects(context.out).records(ContributionAccepted)
    ledger.accepted(record)
    (verdict, *_) = Effects(context.out).sent(Verdict)
    assert verdict.accepted and verdict.blamed == (VOLUNTEER,)
    ledger.check()


def test_the_ledger_waits_for_a_server_that_computes() -> None:
    """Two that agree count where nobody reliable computes, and not while a server of the stage does; when the operator
    takes the servers' devices away, they count again."""
    for ready, collocated, counted in ((True, "when_empty", 0), (False, "when_empty", 1), (True, "never", 1)):
        config = make_config()
        stages = msgspec.structs.replace(config.stages, collocated=collocated)
        context = make_context("f0", msgspec.structs.replace(config, stages=stages))
        if ready:
            context.computing[NodeId("b0")] = None
        ledger = LedgerRole(context)
        ledger.on_step_opened(StepOpened(ledger_generation=1, step=0, closed=-1))
        Effects(context.out)
        for said in (result(1), result(2, OTHER)):
            for shard in (0, 1):
                ledger.on_stored(msgspec.structs.replace(said, shard=shard, square_norm=math.inf))
        assert len(Effects(context.out).records(ContributionAccepted)) == counted


@pytest.mark.parametrize(("writer", "measured"), [(VOLUNTEER, True), (NodeId("f0"), False), (NodeId("b0"), False)])
def test_what_a_server_makes_in_the_place_of_something_doubted_is_measured(writer: NodeId, measured: bool) -> None:
    """What comes from volunteers was measured on its way, and the ledger compares the two: beside one of size 0 an
    honest volunteer's large gradient seemed false, and it was left out for ten minutes."""
    context = make_context("b0")
    assert context.config.wire.gradients != "gi"
    shard = ShardRole(context, BuddyRole(context, Copies(context.out)))
    shard.start([])
    shard.set_elements(ELEMENTS)
    shard.base_loaded(b"digest 0")
    tasks = (backward(0, 0),)
    shard.on_verdict(Verdict(
        ledger_generation=1, contribution=contribution(7, OTHER), step=0, tasks=tasks, accepted=False, doubted=True,
        number=-1, reason="its gradient (5) is beyond all that is usual here (4)",
    ))  # fmt: skip
    Effects(context.out)
    message = msgspec.structs.replace(part(1, 0, tasks, 1, 101), contribution=contribution(1, writer))
    assert shard.on_contribute(writer, msgspec.structs.replace(message, square_norm=9.0 * measured)) == ""
    effects = Effects(context.out)
    assert len(effects.jobs(Measure)) == (not measured)
    for measure in effects.jobs(Measure):
        shard.measured(measure, 25.0)
        effects = Effects(context.out)
    (record,) = effects.records(ContributionStored)
    shard.stored(record)
    assert Effects(context.out).sent(Stored)[0].square_norm == (9.0 if measured else 25.0)


def test_a_servers_gradient_that_was_not_measured_blames_nobody() -> None:
    """Nor one of which a shard knows the size and another does not; where all know it, it tells who lied."""
    for norms, blamed in (((0.0, 0.0), ()), ((1.0, 0.0), ()), ((1.0, 0.5), (VOLUNTEER,)), ((1e9, 1e9), ())):
        ledger = LedgerRole(make_context("f0"))
        ledger.on_step_opened(StepOpened(ledger_generation=1, step=0, closed=-1))
        Effects(ledger._context.out)
        for said, squares in ((result(1), (1e10, 1e10)), (result(2, NodeId("b0")), norms)):
            for shard, square in enumerate(squares):
                ledger.on_stored(msgspec.structs.replace(said, shard=shard, square_norm=square))
        (accepted,) = Effects(ledger._context.out).records(ContributionAccepted)
        assert accepted.contribution.node == "b0"
        ledger.accepted(accepted)
        assert [said.blamed for said in Effects(ledger._context.out).sent(Verdict, NodeId("b0"))] == [blamed]


def test_who_is_blamed_gets_nothing_for_a_while() -> None:
    """Ten minutes, with the reason."""
    conduct = Conduct()
    ruling = conduct.blamed(VOLUNTEER, 5.0)
    assert (ruling.leases_max, conduct.leases_max(VOLUNTEER, 6.0)) == (0, 0) and "computed" in ruling.reason


@pytest.mark.parametrize("form", ["fp64", "fp32", "bf16"])
def test_the_receiver_measures_what_it_gets(form: str) -> None:
    """Whatever the sender says: the square of the norm, or infinity where a value is not finite."""
    values = np.array([1.0, 2.0, -2.0], dtype=np.float64 if form == "fp64" else np.float32)
    for last, expected in ((-2.0, 9.0), (math.inf, math.inf), (math.nan, math.inf)):
        values[2] = last
        data = values.tobytes() if form != "bf16" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        ref = TensorRef(0, (3,), form, len(data))  # type: ignore[arg-type]
        message: Contribute = msgspec.structs.replace(part(1, 0, (backward(0, 0),), 0, 1), tensors=(ref,))
        assert square_norm(message.tensors, [data]) == expected

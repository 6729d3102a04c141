"""What a volunteer looks at before it works for a server: a lease that could crash or mislead it is refused by name."""

from __future__ import annotations

from node.machine.outbox import Outbox
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import DIFFERENCES_MAX
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.base.machine import HangUp
from protocol.messages import Audit, InputAnswer, Lease, Parameters, StepClosed, Verdict, Work
from protocol.run.batches import Batches
from protocol.run.course import VALIDATION_FIRST
from protocol.run.plan import Plan
from protocol.run.run import RunConfig
from protocol.run.segments import segment_ranges


def refuse(out: Outbox, peer: NodeId, tensors: tuple[TensorRef, ...], error: RemoteProtocolError) -> None:
    """Hangs up on a server that has broken a rule."""
    out.drop(tensors)
    out.count("barnraise_transport_rejected_messages_total", reason=error.reason)
    out.log("warning", "message refused", peer=peer, reason=error.reason, detail=error.detail)
    out.add(HangUp(peer, str(error)))


def check_from_server(batches: Batches, plan: Plan, stage: int, peer: NodeId, message: Work) -> None:
    """Raises `RemoteProtocolError` (role, decode, version or shape) for what no honest server of our stage says.

    Whether numbers are finite is the driver's business, and who `peer` is was proven by the handshake.
    """
    config = batches.now
    match message:
        case Lease():
            _check_lease(batches, plan, stage, peer, message)
        case InputAnswer() if message.tensors:
            task = message.task
            parts = 1 if task.microbatch >= VALIDATION_FIRST else config.batch.segments
            if task.segment >= parts:
                raise RemoteProtocolError("decode", f"{task} is no task of this run")
            segment = task.segment if parts > 1 else None
            takes = _hidden(config, segment) if task.op == "B" else _input(config, task.position, segment)
            _check_tensors(message.tensors, (takes,))
        case Parameters() if message.tensors:
            if message.shard != plan.shard_of(peer):
                raise RemoteProtocolError("role", f"shard {message.shard} from the server of another one")
            steps = message.version - message.base if message.base >= 0 else 1
            if not 1 <= steps <= DIFFERENCES_MAX or (message.base >= 0 and config.wire.parameters != "p12"):
                raise RemoteProtocolError("version", f"version {message.version} from {message.base}")
            forms = [config.wire.parameters] * steps + ["gi"] * (config.wire.gradients == "gi")
            if [ref.form for ref in message.tensors] != forms or any(len(ref.shape) != 1 for ref in message.tensors):
                raise RemoteProtocolError("shape", f"a shard of parameters is one vector each in {forms}")
        case Verdict() if peer != plan.ledger_of(stage):
            raise RemoteProtocolError("role", "a verdict that is not the ledger's")
        case Audit():
            _check_audit(batches, plan, stage, peer, message)
        case StepClosed() if message.step >= config.steps:
            raise RemoteProtocolError("decode", f"step {message.step} of {config.steps} is closed")
        case _:
            pass


def _check_lease(batches: Batches, plan: Plan, stage: int, peer: NodeId, lease: Lease) -> None:
    config = batches.now
    ops = "".join(task.op for task in lease.tasks)
    aside = bool(lease.tasks) and lease.tasks[0].microbatch >= VALIDATION_FIRST
    if ops not in (("F", "FL") if aside else ("F", "B", "FLB")):
        raise RemoteProtocolError("decode", f"a lease of {ops or 'nothing'}")
    first = lease.tasks[0]
    end = plan.length(first.step, first.microbatch)
    for task in lease.tasks:
        place = TaskId(first.step, first.microbatch, end if task.op == "L" else first.position, task.op)
        if task != place or plan.stage_at(task.step, task.microbatch, task.position) != stage:
            raise RemoteProtocolError("role", f"{task} is not of stage {stage}, or not of one lease")
    if first.position >= end or not batches.has(first.step, first.microbatch):
        raise RemoteProtocolError("decode", f"{first} is no task of this run")
    if ("L" in ops) != (first.position == end - 1):
        raise RemoteProtocolError("decode", f"{ops} at position {first.position} of {end}")
    if lease.version != config.version_of(first.step):
        raise RemoteProtocolError("version", f"version {lease.version} for step {first.step}")
    visit = first.step, first.microbatch, first.position
    owners = plan.front_of(*visit), plan.back_of(*visit)
    if (lease.front, lease.back) != owners or peer != owners[ops == "B"]:
        raise RemoteProtocolError("role", f"{first} is not this server's to lease")
    if lease.need_input_gradient and first.position == 0:
        raise RemoteProtocolError("decode", "an input gradient of tokens")
    if aside and (lease.need_input_gradient or lease.need_weight_gradient):
        raise RemoteProtocolError("decode", "a gradient of the validation")
    parts = 1 if aside else config.batch.segments
    takes = _input(config, first.position, 0 if parts > 1 else None)
    gradient = _hidden(config, parts - 1 if parts > 1 else None)
    labels = (config.batch.samples, config.model.context), "int32"
    expected = {"F": (takes,), "B": (gradient,), "FLB": (takes, labels), "FL": (takes, labels)}
    _check_tensors(lease.tensors, expected[ops])


def _check_audit(batches: Batches, plan: Plan, stage: int, peer: NodeId, audit: Audit) -> None:
    config = batches.now
    if peer != plan.ledger_of(stage):
        raise RemoteProtocolError("role", "an audit that is not the ledger's")
    for task in audit.tasks:
        if (
            task.microbatch >= VALIDATION_FIRST
            or task.step != audit.step
            or not batches.has(task.step, task.microbatch)
        ):
            raise RemoteProtocolError("decode", f"{task} is no task of step {audit.step}")
        end = plan.length(task.step, task.microbatch)
        if task.op not in ("B", "L") or task.position >= end + (task.op == "L"):
            raise RemoteProtocolError("decode", f"{task} is no task of this run")
        if plan.stage_at(task.step, task.microbatch, task.position) != stage:
            raise RemoteProtocolError("role", f"{task} is not of stage {stage}")
    if audit.version != config.version_of(audit.step):
        raise RemoteProtocolError("version", f"version {audit.version} for step {audit.step}")


def _hidden(config: RunConfig, segment: int | None) -> tuple[tuple[int, ...], str]:
    """Of a whole sample (None), or of one segment."""
    first, end = (0, config.model.context) if segment is None else segment_ranges(config)[segment]
    return (config.batch.samples, end - first, config.model.hidden), config.wire.activations_down


def _input(config: RunConfig, position: int, segment: int | None) -> tuple[tuple[int, ...], str]:
    """What comes into a visit: tokens where the route begins."""
    return _hidden(config, segment) if position > 0 else ((config.batch.samples, config.model.context), "int32")


def _check_tensors(tensors: tuple[TensorRef, ...], expected: tuple[tuple[tuple[int, ...], str], ...]) -> None:
    if tuple((ref.shape, ref.form) for ref in tensors) != expected:
        got = [f"{ref.form}{list(ref.shape)}" for ref in tensors]
        raise RemoteProtocolError(
            "shape", f"expected {[f'{form}{list(shape)}' for shape, form in expected]}, got {got}"
        )

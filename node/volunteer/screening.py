"""What a volunteer looks at before it works for a server: a lease that could crash or mislead it is refused by name."""

from __future__ import annotations

from protocol.errors import RemoteProtocolError
from protocol.ids import NodeId, TaskId, TensorRef
from protocol.messages import InputAnswer, Lease, Parameters, StepClosed, Verdict, Work
from protocol.plan import Plan
from protocol.run import RunConfig


def check_from_server(config: RunConfig, plan: Plan, stage: int, peer: NodeId, message: Work) -> None:
    """Raises `RemoteProtocolError` (role, decode, version or shape) for what no honest server of our stage says.

    Whether numbers are finite is the driver's business, and who `peer` is was proven by the handshake.
    """
    match message:
        case Lease():
            _check_lease(config, plan, stage, peer, message)
        case InputAnswer() if message.tensors:
            _check_tensors(message.tensors, (_input(config, stage),))
        case Parameters() if message.tensors:
            if message.shard != plan.shard_of(peer):
                raise RemoteProtocolError("role", f"shard {message.shard} from the server of another one")
            if len(message.tensors) != 1 or len(message.tensors[0].shape) != 1:
                raise RemoteProtocolError("shape", "a shard of parameters is one vector")
            if message.tensors[0].form != config.wire.parameters:
                raise RemoteProtocolError("shape", f"parameters in {message.tensors[0].form}")
        case Verdict() if peer != plan.ledger_of(stage):
            raise RemoteProtocolError("role", "a verdict that is not the ledger's")
        case StepClosed() if message.step >= config.steps:
            raise RemoteProtocolError("decode", f"step {message.step} of {config.steps} is closed")
        case _:
            pass


def _check_lease(config: RunConfig, plan: Plan, stage: int, peer: NodeId, lease: Lease) -> None:
    ops = "".join(task.op for task in lease.tasks)
    if ops not in ("F", "B", "FLB"):
        raise RemoteProtocolError("decode", f"a lease of {ops or 'nothing'}")
    first = lease.tasks[0]
    end = len(plan.stages)
    for task in lease.tasks:
        place = TaskId(first.step, first.microbatch, end if task.op == "L" else first.position, task.op)
        if task != place or plan.stage_at(task.microbatch, task.position) != stage:
            raise RemoteProtocolError("role", f"{task} is not of stage {stage}, or not of one lease")
    if first.position >= end or first.microbatch >= config.batch.microbatches or first.step >= config.steps:
        raise RemoteProtocolError("decode", f"{first} is no task of this run")
    if (ops == "FLB") != (stage == plan.last_position and ops != "B"):
        raise RemoteProtocolError("decode", f"{ops} at stage {stage}")
    if lease.version != config.version_of(first.step):
        raise RemoteProtocolError("version", f"version {lease.version} for step {first.step}")
    owners = plan.front_of(stage, first.microbatch), plan.back_of(stage, first.microbatch)
    if (lease.front, lease.back) != owners or peer != owners[ops == "B"]:
        raise RemoteProtocolError("role", f"{first} is not this server's to lease")
    if lease.need_input_gradient and stage == 0:
        raise RemoteProtocolError("decode", "an input gradient of tokens")
    labels = (config.batch.samples, config.model.context), "int32"
    expected = {"F": (_input(config, stage),), "B": (_hidden(config),), "FLB": (_input(config, stage), labels)}
    _check_tensors(lease.tensors, expected[ops])


def _hidden(config: RunConfig) -> tuple[tuple[int, ...], str]:
    return (config.batch.samples, config.model.context, config.model.hidden), config.wire.activations


def _input(config: RunConfig, stage: int) -> tuple[tuple[int, ...], str]:
    return _hidden(config) if stage > 0 else ((config.batch.samples, config.model.context), "int32")


def _check_tensors(tensors: tuple[TensorRef, ...], expected: tuple[tuple[tuple[int, ...], str], ...]) -> None:
    if tuple((ref.shape, ref.form) for ref in tensors) != expected:
        got = [f"{ref.form}{list(ref.shape)}" for ref in tensors]
        raise RemoteProtocolError(
            "shape", f"expected {[f'{form}{list(shape)}' for shape, form in expected]}, got {got}"
        )

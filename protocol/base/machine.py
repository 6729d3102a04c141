"""The shape of every machine: plain synchronous code, inputs and time in, effects out.

A machine has no clock, socket, thread, disk or randomness of its own, and holds references to tensors, never
tensors. Two drivers run the same machines: a daemon on trio, and a simulated world on an event heap.

    start(now) -> effects      handle(input, now) -> effects      wake_at() -> time | None      wake(now) -> effects
    check()    -> raises if an invariant is broken

Inputs are facts, in the past tense; effects are orders, in the imperative. The driver must perform the effects of
one call in their order, and must deliver `Persisted` only after the record would survive a power cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocol.base.ids import NodeId
from protocol.messages import Message


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A link to `peer` is open and its identity and membership are proven."""

    peer: NodeId
    role: str
    """What its credential says: coordinator, server or volunteer."""
    public_key: bytes = b""
    """The peer's Ed25519 key, for whoever issues memberships."""
    credential: bytes = field(default=b"", repr=False)
    """The membership or invite that it showed, signature already checked."""
    address: str = ""
    """HOST:PORT at the other end; empty where there is no network."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link to `peer` is gone; what was sent on it may or may not have arrived."""

    peer: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class LinkMoved:
    """The link to `peer` goes another way from now on. Nothing is lost; what was on its way comes late where the old
    way carried nothing at the end."""

    peer: NodeId
    silent_s: float
    """How long nothing had come from the peer; next to nothing where a better way was found for a sound link."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a proven peer. Its tensors are complete, in the store, and owned by the machine."""

    peer: NodeId
    message: Message
    size: float = 0.0
    """Of a volunteer's activation or its gradient, which is used before anybody can check it: the root mean square of
    its values, or a little more; infinite if one is not finite. 0: not measured."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A job ended well; `result` is what the job's docstring says."""

    job: Any
    result: Any


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """A job ended with an error of the device or of its data."""

    job: Any
    reason: str


@dataclass(frozen=True, slots=True)
class WorkGoesOn:
    """A job that may take hours is not stuck; what it does next may be silent for `silent_s`."""

    job: Any
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Persisted:
    """The record of `Persist` with this number is durable."""

    record_number: int


@dataclass(frozen=True, slots=True)
class Told:
    """The person or program in charge of this process asks for something (`drain`, `stop`, …)."""

    what: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """The operator orders something of the machine; `order` is one of its own kinds (`coordinator.live.orders`)."""

    order: Any


@dataclass(frozen=True, slots=True)
class WallClockMoved:
    """The wall clock runs no longer beside the machine's: it was set, or the computer slept, which `now` leaves out."""

    wall_offset_s: float
    """Seconds since 1970 minus the machine's `now`, from here on."""


@dataclass(frozen=True, slots=True)
class CheckpointsFound:
    """A server that did not know the run has now looked where the run keeps its checkpoints."""

    steps: tuple[int, ...]
    """Complete and readable ones, newest first."""


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """The process that had the device has ended by itself, and a fresh one is there that knows nothing."""

    reason: str


@dataclass(frozen=True, slots=True)
class AddressesChanged:
    """From now on this node can be dialled here, and nowhere else."""

    addresses: tuple[str, ...]
    """By anybody."""
    local_addresses: tuple[str, ...] = ()
    """By its own network alone."""


@dataclass(frozen=True, slots=True)
class PlanReady:
    """A planner has answered `StartPlanning`, or has failed: then there is no `proposal`, and the sentence says why."""

    number: int
    proposal: Any
    sentence: str = ""


Input = (
    LinkUp
    | LinkDown
    | LinkMoved
    | Received
    | Computed
    | ComputeFailed
    | WorkGoesOn
    | Persisted
    | Told
    | Ordered
    | WallClockMoved
    | CheckpointsFound
    | AddressesChanged
    | DeviceLost
    | PlanReady
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a peer; lost without a word when the link is down (a link that comes up is synced anew)."""

    peer: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Dial:
    """Try to open a link; the outcome is `LinkUp` or `LinkDown`."""

    peer: NodeId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the link to `peer`; the reason goes to the log and to the peer.

    `fault`: it was the peer's, and it has to wait before it may come again. `silent_s`: only if nothing has come for so
    long, where something large is under way: a machine hears of messages that are whole, and on a slow line a word may
    wait that long behind a tensor.
    """

    peer: NodeId
    reason: str
    fault: bool = False
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Compute:
    """Start a job; jobs of one lane run one after the other in the order given."""

    job: Any


@dataclass(frozen=True, slots=True)
class Persist:
    """Write a record, with its tensors, so that it survives a crash; answered by `Persisted`."""

    record_number: int
    record: Any


@dataclass(frozen=True, slots=True)
class Prune:
    """Durable records of steps below `step` are no longer needed."""

    step: int


@dataclass(frozen=True, slots=True)
class DropTensors:
    """The store may forget these tensors."""

    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShareTensor:
    """The store keeps the tensor of `key` under `copy` too (both must be dropped)."""

    key: int
    copy: int


@dataclass(frozen=True, slots=True)
class Log:
    """A line for the log: an event and its fields."""

    level: str
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter or set a gauge of `metrics.py`."""

    metric: str
    value: float = 1.0
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StartPlanning:
    """Have a planner work on a problem, beside everything else; answered by `PlanReady` with the same number."""

    number: int
    problem: Any


@dataclass(frozen=True, slots=True)
class Exit:
    """The machine is done: the process ends."""

    reason: str


Effect = (
    Send | Dial | HangUp | Compute | Persist | Prune | DropTensors | ShareTensor | Log | Count | StartPlanning | Exit
)


class Machine(Protocol):
    """What a driver drives."""

    def start(self, now: float) -> Sequence[Effect]: ...

    def handle(self, fact: Input, now: float) -> Sequence[Effect]: ...

    def wake_at(self) -> float | None: ...

    def wake(self, now: float) -> Sequence[Effect]: ...

    def check(self) -> None: ...

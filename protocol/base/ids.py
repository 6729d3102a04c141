"""Names of things: nodes, tasks, contributions, tensors.

The bounds in the types are checked by the codec while it decodes, before anything is built from a peer's bytes.
"""

from __future__ import annotations

from typing import Annotated, Literal, NewType

from msgspec import Meta, Struct

from protocol.base.forms import FormName
from protocol.base.limits import DIMENSIONS_MAX, NUMBER_MAX

NodeId = NewType("NodeId", str)
"""52 letters and digits (base32 of BLAKE2b-256 over the node's public key); see `protocol.trust.identity`."""

Op = Literal["F", "L", "B", "I", "W"]
"""Forward, loss, fused backward, input half and weight half of a split backward."""

_Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
_Small = Annotated[int, Meta(ge=0, lt=2**32)]


class TaskId(Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """One piece of work of a run, stable over re-issues (design section 3). The stage follows from the route."""

    step: _Number
    microbatch: _Small
    position: _Small
    """Place along the microbatch's route, from 0; the loss stands at the route's length."""
    op: Op
    segment: _Small = 0
    slice: _Small = 0

    def __str__(self) -> str:
        segment = f".{self.segment}" if self.segment else ""
        return f"{self.step}:{self.op}{self.microbatch}{segment}@{self.position}"

    @property
    def whole(self) -> TaskId:
        """The task of all segments together: what is leased, covered and counted."""
        if not self.segment:
            return self
        return TaskId(self.step, self.microbatch, self.position, self.op, 0, self.slice)


TICKET_BYTES = 16
"""Bytes of a ticket's MAC: a guess succeeds once in 2^128."""


class Ticket(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Proof of a lease: what a server of the stage gave with it, and wants to see with its result."""

    fence: _Number
    """Tells the lease from others of the same task."""
    mac: Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]


class ContributionId(Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A volunteer's upload: the same content whenever it is sent again."""

    node: NodeId
    incarnation: _Number
    """Drawn anew when the process starts, so a restarted node never reuses a number."""
    number: _Number


class TensorRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A handle on a tensor that lies in the driver's store, or in the frames beside a message."""

    key: _Number
    """The number in the store; on the wire, the index among the message's tensors."""
    shape: Annotated[tuple[_Number, ...], Meta(max_length=DIMENSIONS_MAX)]
    form: FormName
    byte_count: _Number

"""Names of things: nodes, tasks, contributions, tensors."""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

NodeId = NewType("NodeId", str)
"""52 letters and digits (base32 of BLAKE2b-256 over the node's public key); see `protocol.identity`."""

Op = Literal["F", "L", "B", "I", "W"]
"""Forward, loss, fused backward, input half and weight half of a split backward."""


class TaskId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One piece of work of a run, stable over re-issues (design section 3). The stage follows from the route."""

    step: int
    microbatch: int
    position: int
    """Place along the microbatch's route, from 0; the loss stands at the route's length."""
    op: Op
    segment: int = 0
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.step}:{self.op}{self.microbatch}@{self.position}"


class ContributionId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A volunteer's upload: the same content whenever it is sent again."""

    node: NodeId
    incarnation: int
    """Drawn anew when the process starts, so a restarted node never reuses a number."""
    number: int


class TensorRef(msgspec.Struct, frozen=True, array_like=True):
    """A handle on a tensor that lies in the driver's store, or in the frames beside a message."""

    key: int
    """The number in the store; on the wire, the index among the message's tensors."""
    shape: tuple[int, ...]
    form: Literal["fp32", "bf16", "int32", "int61"]
    byte_count: int

"""How far two results of one computation lie apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from node.compute.forms.grid import EDGE_PARTS
from protocol.run.audits import RESIDUAL_PARTS

CHUNK_ELEMENTS = 1 << 20
"""Elements whose directions are drawn at once: 16 MB beside vectors of gigabytes."""


def relative_difference(computed: Tensor, claimed: Tensor) -> float:
    """|claimed - computed| / |computed| (L2, in fp64) of two vectors of one shape; 0 exactly if no bit of them differs.

    Not finite where one of them is not, or where a vector of zeros was claimed to be another.
    """
    if torch.equal(computed, claimed):
        return 0.0
    ours, theirs = computed.double(), claimed.double()
    size = float(torch.linalg.vector_norm(ours))
    distance = float(torch.linalg.vector_norm(theirs - ours))
    return distance / size if size > 0.0 else math.inf


@dataclass(slots=True)
class Edges:
    """How near the gradients of a sum on a grid were to being rounded otherwise; see `grid_difference`."""

    nearest: Tensor
    """[2, elements] uint8: of all tasks the smallest distance to one step lower, and to one higher, in `EDGE_PARTS`."""
    tasks: int = 0

    @classmethod
    def none_yet(cls, elements: int) -> Edges:
        return cls(torch.full((2, elements), EDGE_PARTS, dtype=torch.uint8))


def grid_difference(computed: Tensor, claimed: Tensor, units: Tensor, edges: Edges, relative: float) -> float:
    """By how much the gradients of two sums on a grid must have differed before they were rounded, relative to the sum.

    A gradient is rounded to whole steps by a hash, and a sum has one or two steps in most places. So another device,
    whose gradients differ by 0.4 %, ends on another step in a few places of a thousand, each by a whole step: the sums
    differ by 4 %. Two bounds from below, of which the larger counts. In each place the gradients must have differed at
    least by what was missing to the next step. And on average a difference of size e moves e over a step of the places,
    so that the sums differ by e² + e r, where r is the length of a vector of steps relative to the sum.

    Args:
        computed, claimed: [elements] int32.
        units: [elements] the length of a step in each place.
        edges: of the tasks whose sum `computed` is.
        relative: `relative_difference` of what the two stand for.
    """
    if edges.tasks == 0 or not 0.0 < relative < math.inf:
        return relative
    size = float(torch.linalg.vector_norm(units.double() * computed))
    moved = claimed.long() - computed
    lower, higher = edges.nearest
    nearest = torch.where(moved > 0, higher, lower).double() / EDGE_PARTS
    count = moved.abs()
    needed = count.clamp(max=edges.tasks) * nearest + (count - edges.tasks).clamp(min=0)
    least = float(torch.linalg.vector_norm(needed * units)) / size
    steps = float(torch.linalg.vector_norm(units.double())) * math.sqrt(edges.tasks) / size
    return max(least, (math.sqrt(steps * steps + 4.0 * relative * relative) - steps) / 2.0)


def residual(computed: Tensor, claimed: Tensor, seed: bytes) -> tuple[float, ...]:
    """(claimed - computed) / |computed| in `RESIDUAL_PARTS` numbers: along the computed vector, then a count sketch.

    In the sketch each element is added, with a sign, to one of the numbers, as the seed says: its length is the
    difference's on average, the same difference gives the same numbers, and independent ones average out. All 0 for
    equal vectors, or where there is no number.
    """
    none = (0.0,) * RESIDUAL_PARTS
    if computed.shape != claimed.shape or torch.equal(computed, claimed):
        return none
    ours, theirs = computed.flatten(), claimed.flatten()
    size = float(torch.linalg.vector_norm(ours.double()))
    if not 0.0 < size < math.inf:
        return none
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    sketch, along = torch.zeros(RESIDUAL_PARTS - 1, dtype=torch.float64), 0.0
    for start in range(0, len(ours), CHUNK_ELEMENTS):
        mine = ours[start : start + CHUNK_ELEMENTS].double().cpu()
        difference = (theirs[start : start + CHUNK_ELEMENTS].double().cpu() - mine) / size
        along += float(torch.dot(difference, mine)) / size
        drawn = torch.randint(2 * len(sketch), difference.shape, generator=generator)
        sketch.index_add_(0, drawn // 2, torch.where(drawn % 2 == 0, difference, -difference))
    found = (along, *sketch.tolist())
    return found if all(map(math.isfinite, found)) else none

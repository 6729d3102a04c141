"""How far two results of one computation lie apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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

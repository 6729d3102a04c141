"""How far two results of one computation lie apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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

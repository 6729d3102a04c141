"""Whether a device that is there computes, and what its errors mean.

A card that this torch has no kernels for (it is too old, or too new) looks like any other until it is asked to add two
numbers; and each library that takes a device's memory has words of its own for having none left.
"""

from __future__ import annotations

from functools import cache

import torch

NO_MEMORY = (
    "out of memory", "status_alloc_failed", "allocation_failed", "defaultcpuallocator", "out_of_device_memory",
    "out_of_host_memory",
)  # fmt: skip
"""What an error says, in small letters, for want of memory: torch's own words, and the codes of libraries that take
memory beside torch (cuBLAS, cuDNN, Level Zero)."""
BROKEN = ("CUDA error", "HIP error")
"""How torch begins to say what the driver has found."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, in any library's words."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error).lower() for words in NO_MEMORY)
    )


def is_of_the_driver(error: BaseException) -> bool:
    """Whether an error is the driver's word of a device that has failed, which is more than a lack of memory."""
    return not is_out_of_memory(error) and any(words in str(error) for words in BROKEN)


def first_line(error: BaseException) -> str:
    """What torch says of an error, without its advice to programmers."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def compute_a_little(where: torch.device) -> None:
    """Kernels that every task needs; raises what torch raises. Takes memory for a context there."""
    torch.ones(2, device=where).sum().item()


@cache
def why_not(where: torch.device) -> str:
    """Why nothing can be computed there, in torch's words; empty where it can. Asked once in a process, so that all of
    it has one answer. A device whose memory others have filled works: it is only full."""
    try:
        compute_a_little(where)
    except RuntimeError as error:
        return "" if is_out_of_memory(error) else first_line(error)
    return ""

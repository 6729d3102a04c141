"""What a node waits for, in words for people: short, without codes, steps counted from 1 as people count them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from protocol.base.ids import TaskId


class Wait(NamedTuple):
    """Something that an open step waits for."""

    step: int
    """The step's number, counted from 0."""
    what: str
    """The words after "waits for"."""


def work_name(tasks: Sequence[TaskId]) -> str:
    """One unit of work: `forward of microbatch 3`."""
    ops = {task.op for task in tasks}
    names = [name for name, of in (("forward", "FL"), ("backward", "BIW")) if ops & set(of)]
    return f"{' and '.join(names)} of microbatch {tasks[0].microbatch}"


def sentence(waits: Iterable[Wait | None]) -> str:
    """`step 250: forward of microbatch 2 by 5p3e75i6; 6 weight gradients; step 251: …`, the oldest step first."""
    by_step: dict[int, list[str]] = {}
    for wait in waits:
        if wait is not None and wait.what not in by_step.setdefault(wait.step, []):
            by_step[wait.step].append(wait.what)
    return "; ".join(f"step {step + 1}: {'; '.join(by_step[step])}" for step in sorted(by_step))


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)

"""Which checkpoints of a run are kept: the newest few, and where results are audited, older ones ever farther apart.

`barnraise run void NODE` goes back to before NODE came, and who is found out may have come long ago. So for any age of
its first step a checkpoint is kept that is at most seven times as old (five, by trial: `tests/protocol/run`), and no
more than one or so for each doubling of the age: 14 of the 3,000 of a long run.

The rule looks at steps only, and what it drops it would drop from any larger set too: servers that delete one by one,
and a coordinator that knows all the names there ever were, come to the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from protocol.run.run import RunConfig

APART = 4
"""A checkpoint goes when an older one lies in the same aligned block of 4, 16, 64, … steps, and half as many have been
done since: blocks of four times the length count from four times the age on."""


def kept_steps(steps: Collection[int], config: RunConfig) -> frozenset[int]:
    """Of the steps of all checkpoints, those that stay."""
    rising = sorted(steps)
    newest = rising[-config.checkpoint.keep :]
    if config.audit.rate <= 0.0:
        return frozenset(newest)
    return frozenset(newest) | {step for step in rising if not _is_between(step, rising)}


def _is_between(step: int, rising: list[int]) -> bool:
    block = APART
    while block <= 2 * (rising[-1] - step):
        first = step - step % block
        if rising[bisect_left(rising, first)] < step:
            return True
        block *= APART
    return False

"""Which generation a coordinator begins with: one that no plan has had, however old the database is that it finds.

A database that is put back says `N`, though plans of `N + 1` and later have been told already. Whoever heard of one
refuses another plan under its number, and whoever did not follows it: the run stands still between the two. So a
coordinator that starts again counts from the milliseconds since 1970. Each plan waits for a disk, so that plans cannot
overtake the clock, and a later start is above all that an earlier one has told. The very first start counts from one.

Where the clock was set back, the database's own count still grows; only both at once, an old database and a clock that
is behind what was told, can open a number twice, and then what servers show decides as far as it goes (`adoption.py`).
"""

from __future__ import annotations

PER_SECOND = 1000


def first_generation(known: int, again: bool, wall_s: float) -> int:
    """The generation of a start.

    Args:
        known: the newest that the database knows of, 0 for none.
        again: whether the run has been started before, as far as anything tells.
        wall_s: seconds since 1970 by this computer's clock.
    """
    return max(known + 1, int(PER_SECOND * wall_s)) if again else known + 1

"""What a seed's run and weather are held to, where a rule matters that most runs never come near.

Nothing here says what must happen: under any scene the same invariants hold, and the unchanged machines keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scene:
    """The default leaves all to the seed."""

    always: tuple[str, ...] = ()
    """Kinds of weather that blow beside those that the seed draws."""
    only: tuple[str, ...] = ()
    """If any: these kinds blow, and no others."""
    gap_s: tuple[float, float] = (0.15, 1.5)
    """The mean time between two faults is drawn from here."""
    until_s: tuple[float, float] = (4.0, 20.0)
    """When the weather calms down is drawn from here."""
    disk_losses_max: int = 2
    run: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Shape`, whatever the seed draws for them."""
    loses: tuple[str, ...] = ()
    """Kinds of records that a disk which lies about a sync loses; none: any."""
    lies: tuple[str, ...] | None = None
    """What a liar says or does, by names of `LIES` and `BENDS`; None: all of `LIES`, and absurd contributions."""

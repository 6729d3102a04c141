"""How a mutant is written down: what it patches, and the scene in which its rule matters. `mutants.py` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.simulation.scene import Scene

Patch = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """`scene` is where its rule matters, and it is hunted there."""

    patch: Patch
    scene: Scene
    seeds: range


SEEDS = 20
"""On which a mutant is hunted: from the first on, where it names no other."""
MUTANTS: dict[str, Mutant] = {}
EQUIVALENT: dict[str, tuple[Patch, str]] = {}


def _replaces(owner: object, name: str, make: Callable[[Any], Any]) -> Patch:
    @contextmanager
    def patch() -> Iterator[None]:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    return patch


def mutant(
    owner: object, name: str, *weather: str, scene: Scene | None = None, also: object = None, first: int = 1
) -> Callable[[Callable[[Any], Any]], None]:
    """Registers a function `original -> changed` as the mutant of `owner.name`, under the function's own name.

    Args:
        weather: kinds that blow beside what a seed draws, where no whole scene is given.
        also: a second place where the rule stands under the same name.
        first: of the twenty seeds, for a rule that matters so seldom that others of a hundred show it.
    """

    def register(make: Callable[[Any], Any]) -> None:
        @contextmanager
        def patch() -> Iterator[None]:
            with ExitStack() as stack:
                for each in (owner, also):
                    if each is not None:
                        stack.enter_context(_replaces(each, name, make)())
                yield

        MUTANTS[make.__name__] = Mutant(patch, scene or Scene(always=weather), range(first, first + SEEDS))

    return register


def equivalent(owner: object, name: str, reason: str) -> Callable[[Callable[[Any], Any]], None]:
    def register(make: Callable[[Any], Any]) -> None:
        EQUIVALENT[make.__name__] = (_replaces(owner, name, make), reason)

    return register


LINE: dict[str, Any] = {
    "stages": 2, "chunks": 1, "placement": "line", "skip": 0.0, "swaps": 0, "tied": False, "segments": 1,
    "order": "backward",
}  # fmt: skip
SHORT_LEASES = Scene(
    only=("slow_host",),
    gap_s=(0.1, 0.3),
    run={**LINE, "lease_s": 1.0, "microbatches": 8, "volunteers": 4, "contribution_tasks": 2, "linger_s": 0.25},
)
"""Work is given to a second worker while the first one still does it, and both bring what they made."""

HANGING = Scene(only=("hang",), gap_s=(1.0, 3.0), run={"spares": 2})
"""Lanes and disks in which nothing ends, and somebody who could take their servers' places."""


def liars(*lies: str) -> Scene:
    """Volunteers that do nothing worse than this, and so are given work."""
    return Scene(only=("liar",), gap_s=(0.1, 0.3), run={**LINE, "volunteers": 2}, lies=lies)


CONSPIRACY = Scene(
    only=("liar", "server_kill"),
    gap_s=(0.2, 0.5),
    run={
        **LINE,
        "volunteers": 2,
        "microbatches": 8,
        "contribution_tasks": 1,
        "collocated": "when_empty",
        "spares": 0,
    },
    lies=("absurd",),
)
"""Two liars that bring the same, and servers that start anew: the steps that are open then are not audited."""


def lying(*kinds: str) -> Scene:
    """Disks that lose what they have acknowledged: records of these kinds."""
    return Scene(
        only=("disk_lied",), gap_s=(1.0, 2.0), until_s=(8.0, 14.0), disk_losses_max=3, loses=kinds, run={"steps": 9}
    )

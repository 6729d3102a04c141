"""Whether the run has a newer Barnraise than this computer: said, never done by itself."""

from __future__ import annotations

NAME = "barnraise-"


def update_words(theirs: str, ours: str) -> str:
    """One sentence for the owner where the coordinator's build is newer than ours; else nothing. What is no number of a
    release (a build of somebody's own, a stranger's word) is no reason.

    A coordinator is a stranger: its word must not lead to a line that fetches a program by its name alone from a public
    index, where anybody may have put one.
    """
    there, here = _numbers(theirs), _numbers(ours)
    if not there or not here or there <= here:
        return ""
    return (
        f"the run's coordinator has Barnraise {theirs.removeprefix(NAME)}, this computer {ours.removeprefix(NAME)}: "
        "when it suits you, get that version where you got this one and set it up as README.md says (./deploy/setup)"
    )


def _numbers(build: str) -> tuple[int, ...]:
    parts = build.removeprefix(NAME).split(".")
    return tuple(int(part) for part in parts) if all(part.isdecimal() and len(part) < 6 for part in parts) else ()

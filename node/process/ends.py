"""Why a node's process ends, in words for people and as an exit status for whoever begins it again."""

from __future__ import annotations

GOOD_ENDS = ("finished", "drained", "stopped", "left", "drain time is over")
"""Reasons of `Exit` that are no failure."""
LENT_ENDS = {
    "finished": "the run has done all its steps: nothing is left to do",
    "drained": "what was begun is finished; nothing of it runs here now, and the same command comes back",
    "stopped": "at once; others compute what was not finished, and the same command comes back",
    "left": "as you asked: what was begun is finished, and your yes is taken back; the next start asks again",
    "drain time is over": "what was begun took too long to finish: others compute it; the same command comes back",
}
"""What the end of a lent computer's program means to its owner."""
SERVED_ENDS = {
    "finished": "the run has done all its steps",
    "drained": "what was begun is finished, and its place is free",
    "stopped": "as it was told; the same command goes on from what lies in its state folder",
    "left": "it has given its place back",
    "drain time is over": "what was begun took too long to finish",
}


def end_in_words(reason: str, role: str) -> str:
    """What people read behind the word that programs read."""
    known = LENT_ENDS if role == "volunteer" else SERVED_ENDS
    return known.get(reason, "it cannot go on here; the sentence before says why, if it is not this one")


def is_pause(reason: str) -> bool:
    """Whether a life ended so that another one may begin."""
    return reason.startswith("suspended: ")

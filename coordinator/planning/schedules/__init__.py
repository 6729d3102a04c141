"""Known schedules, each a few lines of the builder in `coordinator.planning.schedules.design`."""

from __future__ import annotations

from importlib import import_module

from coordinator.planning.schedules.design import Design
from protocol.base.errors import BadInputError

#: Name on the command line -> module with `design(stages, microbatches)`; `stages` counts nodes.
KNOWN = {
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved-1f1b": "interleaved",
    "looped-bfs": "looped_bfs",
    "v-shape": "v_shape",
    "chimera": "chimera",
    "zero-bubble-h1": "zero_bubble_h1",
    "seq1f1b": "seq1f1b",
    "seq1f1b-i": "seq1f1b_i",
    "distmm-pipe": "distmm_pipe",
}


def known_design(name: str, stages: int, microbatches: int) -> Design:
    """The design of a known schedule. Raises `BadInputError` for a name that is not one."""
    if name not in KNOWN:
        raise BadInputError(f"NAME: {name!r} is not one of {', '.join(KNOWN)}")
    module = import_module(f"coordinator.planning.schedules.{KNOWN[name]}")
    found = module.design(stages, microbatches)
    assert isinstance(found, Design), f"{module.__name__}.design gives no Design"
    return found

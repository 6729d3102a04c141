"""`python -m tests.benchmarks.timed COMMAND …`: an ordinary daemon that counts the seconds of what trust costs it.

Each second it writes `trust_seconds.json` into its state folder: by kind (tickets, signatures, audits) seconds and
calls, and how long the process has run. A ledger adds a line a step to `closed_steps.txt` beside it: the step, when it
was closed (seconds of `time.monotonic`, the same for all processes of a computer), and how long its seal had waited for
audits. What the counting takes is counted with it.

With a length of turns in the environment, ledgers draw audits in the steps of some turns only (`in_turn`). Nothing else
is changed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.server.audit_desk import AuditDesk
from node.server.audits import Audits
from node.server.tickets import TicketOffice
from protocol.cli import main
from protocol.trust import handshake, identity, membership, seals, signed_file, thanks

FILE, CLOSED = "trust_seconds.json", "closed_steps.txt"
TURN = "BARNRAISE_TEST_AUDIT_TURN_STEPS"
_spent: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in ("tickets", "signatures", "audits")}


def _counted(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    entry = _spent[kind]

    def call(*words: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return original(*words, **named)
        finally:
            entry[0] += time.perf_counter() - begun
            entry[1] += 1

    return call


def count_all() -> None:
    for name in ("issue", "check_message"):
        setattr(TicketOffice, name, _counted("tickets", getattr(TicketOffice, name)))
    for name in ("hold", "look", "on_report", "close_step", "frozen", "wake", "wake_at", "take_audited"):
        setattr(AuditDesk, name, _counted("audits", getattr(AuditDesk, name)))
    identity.Identity.sign = _counted("signatures", identity.Identity.sign)  # type: ignore[method-assign]
    verify = _counted("signatures", identity.verify_signature)
    for module in (handshake, membership, seals, signed_file, thanks):
        module.verify_signature = verify  # type: ignore[attr-defined]


def in_turn(step: int, turn_steps: int) -> bool:
    """Whether a step lies in a turn with audits: with, without, without, with. What becomes slower or faster all the
    time does so for both alike, and there is one change in two turns."""
    return step // turn_steps % 4 in (0, 3)


def take_turns(turn_steps: int) -> None:
    """Of a contribution that is not drawn nobody hears: no auditor fetches anything, no server keeps anything."""
    draw = Audits.draw
    Audits.draw = lambda self, stored: in_turn(stored.step, turn_steps) and draw(self, stored)  # type: ignore[method-assign]


def write_steps(folder: Path) -> None:
    """Each step as it is closed."""
    frozen, close_step = AuditDesk.frozen, AuditDesk.close_step
    waited: dict[int, float] = {}

    def on_frozen(self: AuditDesk, step: int) -> None:
        state = self._steps.get(step)
        if state is not None and state.since is not None:
            waited[step] = self._now - state.since
        frozen(self, step)

    def on_close(self: AuditDesk, step: int) -> None:
        with (folder / CLOSED).open("a") as file:
            file.write(f"{step} {time.monotonic():.6f} {waited.pop(step, 0.0):.6f}\n")
        close_step(self, step)

    AuditDesk.frozen, AuditDesk.close_step = on_frozen, on_close  # type: ignore[method-assign]


def write_down(folder: Path) -> None:
    begun = time.monotonic()
    while True:
        time.sleep(1.0)
        if folder.is_dir():
            draft = folder / f".{FILE}"
            draft.write_text(json.dumps({"seconds": time.monotonic() - begun, **_spent}))
            draft.replace(folder / FILE)


if __name__ == "__main__":
    home = Path(sys.argv[sys.argv.index("--state") + 1])
    count_all()
    write_steps(home)
    if TURN in os.environ:
        take_turns(int(os.environ[TURN]))
    threading.Thread(target=write_down, args=(home,), daemon=True).start()
    main()

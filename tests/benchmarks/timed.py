"""`python -m tests.benchmarks.timed COMMAND …`: an ordinary daemon that counts the seconds of what trust costs it.

Each second it writes `trust_seconds.json` into its state folder: by kind (tickets, signatures, audits) seconds and
calls, and how long the process has run. Nothing else of it is changed; what the counting takes is counted with it.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.server.audit_desk import AuditDesk
from node.server.tickets import TicketOffice
from protocol.cli import main
from protocol.trust import handshake, identity, membership, seals, signed_file, thanks

FILE = "trust_seconds.json"
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


def write_down(folder: Path) -> None:
    begun = time.monotonic()
    while True:
        time.sleep(1.0)
        if folder.is_dir():
            draft = folder / f".{FILE}"
            draft.write_text(json.dumps({"seconds": time.monotonic() - begun, **_spent}))
            draft.replace(folder / FILE)


if __name__ == "__main__":
    count_all()
    home = Path(sys.argv[sys.argv.index("--state") + 1])
    threading.Thread(target=write_down, args=(home,), daemon=True).start()
    main()

"""Keys that were pressed before a question was asked."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time

ASK = """
import select
from node.commands.members import agrees_in_terminal
print("measuring", flush=True)
select.select([0], [], [])  # the early key is there
print("yes" if agrees_in_terminal(False) else "no", flush=True)
"""
PATIENCE_S = 60.0


def read_until(terminal: int, word: bytes) -> bytes:
    """What the terminal shows up to this word."""
    shown, deadline = b"", time.monotonic() + PATIENCE_S
    while word not in shown:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], shown
        shown += os.read(terminal, 4096)
    return shown


def test_an_enter_before_the_question_is_no_yes() -> None:
    """Whoever pressed Enter while the computer was measured had agreed to what was not on the screen yet."""
    terminal, end = os.openpty()
    try:
        with subprocess.Popen([sys.executable, "-c", ASK], stdin=end, stdout=end, stderr=end) as process:
            read_until(terminal, b"measuring")
            os.write(terminal, b"\n")
            read_until(terminal, b"Start?")
            os.write(terminal, b"what\n")
            read_until(terminal, b"Say y (start), n (start nothing)")
            os.write(terminal, b"n\n")
            assert b"yes" not in read_until(terminal, b"no\r\n")
            assert process.wait(PATIENCE_S) == 0
    finally:
        os.close(end)
        os.close(terminal)

"""Words of others never steer a terminal: refused on the wire, marked wherever they are shown."""

from __future__ import annotations

import io

import msgspec
import pytest

from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.printable import MARK, all_printable, printable
from protocol.drive.metrics import Metrics
from protocol.drive.process import set_up_logging
from protocol.link.codec import decode, encode
from protocol.messages import Bye, NodeReport
from protocol.run.run import DataSection, RunConfig

CLIPBOARD = "\x1b]52;c;cm0gLXJmIH4=\x07"
"""OSC 52: a terminal that obeys it puts a command into the clipboard."""
EVIL = (CLIPBOARD, "two\nlines", "back\rspace", "c1 \x9b31m", "right to left \u202e", "\u2028", "\x00", "\x7f")


@pytest.mark.parametrize("evil", EVIL)
def test_the_wire_carries_no_control_characters(evil: str) -> None:
    """A peer that sends some is refused; our own sentences are made fit, since an exception may have written them."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgspec.msgpack.encode(Bye(reason=evil)))
    assert caught.value.reason == "decode"
    ours = decode(encode(NodeReport(state="idle", waiting_for=f"for {evil}", counters={})))
    assert isinstance(ours, NodeReport) and ours.waiting_for.isprintable()


@pytest.mark.parametrize("evil", EVIL)
def test_what_is_shown_is_looked_at_once_more(evil: str) -> None:
    """In plain data of any depth; letters of all languages stay."""
    assert all_printable({evil: [evil, ("日本 é ß", 1)]}) == {printable(evil): [printable(evil), ["日本 é ß", 1]]}
    assert MARK in printable(evil) and printable(evil).isprintable()
    assert printable("a\nb\x1b", keep="\n") == f"a\nb{MARK}"


def test_a_log_on_a_terminal_obeys_nobody() -> None:
    """A peer's name for an unknown field comes back in our decoder's words."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    log = set_up_logging(Metrics(), stream=stream)
    log.warning("message refused", detail=f"unknown field {CLIPBOARD}", names=[CLIPBOARD])
    assert "\x1b]" not in stream.getvalue() and "\x07" not in stream.getvalue()


def test_a_run_with_such_words_is_none() -> None:
    """The coordinator says so before anybody is told; a node that is told refuses it."""
    with pytest.raises(BadInputError, match=r"^source: .* holds control characters"):
        RunConfig(data=DataSection(source=f"/data/{CLIPBOARD}")).validate()

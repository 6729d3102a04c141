"""The wire is frozen by three witnesses that must agree: the code, tests/golden, and protocol/CHANGES.md."""

from __future__ import annotations

import re

import pytest

from protocol.codec import PROTOCOL_MINOR, decode
from protocol.handshake import VERSION
from protocol.messages import MAY_SEND, MESSAGES
from tests.protocol.golden import CHANGES, GOLDEN, form_hash, golden_files
from tests.protocol.samples import samples

_NEWEST = CHANGES.read_text().split("\n## ")[1]


@pytest.mark.parametrize("name", sorted(golden_files()))
def test_golden_files(name: str) -> None:
    """Ids, credentials, handshakes, records and messages have the bytes that were frozen."""
    assert (GOLDEN / name).read_text() == golden_files()[name], "run: python -m tests.protocol.golden"


def test_no_golden_file_is_left_over() -> None:
    """tests/golden of the wire holds nothing that the code no longer writes."""
    assert {path.name for path in GOLDEN.iterdir() if path.is_file()} >= set(golden_files())


def test_golden_messages_decode() -> None:
    """The frozen bytes of each kind decode to its sample, and every kind has some."""
    lines = dict(line.split() for line in (GOLDEN / "messages.txt").read_text().splitlines())
    assert list(lines) == [kind.__name__ for kind in MESSAGES]
    assert [decode(bytes.fromhex(data)) for data in lines.values()] == samples()


def test_changes_names_the_version_in_force() -> None:
    """The newest section of CHANGES.md is the version that this code speaks."""
    assert _NEWEST.splitlines()[0] == f"{VERSION}.{PROTOCOL_MINOR}"


def test_changes_names_the_form_in_force() -> None:
    """No field changes without a line in CHANGES.md: its form hash would not fit."""
    assert re.search(r"Form: `([a-z2-7]+)`", _NEWEST).group(1) == form_hash()  # type: ignore[union-attr]


def test_changes_names_every_kind() -> None:
    """CHANGES.md lists all kinds, in the order of messages.py, and each has an entry in the role table."""
    kinds = re.search(r"Kinds: ([^.]+)\.", _NEWEST).group(1).replace("\n", " ").split(", ")  # type: ignore[union-attr]
    assert kinds == [kind.__name__ for kind in MESSAGES] == [kind.__name__ for kind in MESSAGES if MAY_SEND[kind]]

"""What the owner's side keeps in small files is there after a power cut: none is put in place without its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from node.owner import thanks
from node.owner.consent import FILE as CONSENTS
from node.owner.consent import Consent, keep_consent, read_consents
from node.owner.governor import UserPause
from node.owner.limits import OwnerLimits, read_limits, with_values, write_limits
from node.owner.thanks import read_thanks
from node.platform.local_socket import open_door, tell_more
from node.platform.places import CONTROL_FILE
from node.process.page_gate import PLACE_FILE, keep_place, kept_place
from node.process.pauses import FILE as PAUSE
from node.process.pauses import keep_pause, kept_pause
from tests.node.owner.test_thanks import book, signed

PowerCut = Callable[[Path], None]


def test_limits_are_not_lifted(tmp_path: Path, power_cut: PowerCut) -> None:
    """An empty file was taken for the defaults, without a word."""
    file = tmp_path / "limits.toml"
    wanted = with_values(OwnerLimits(), {"quota": "50 GB", "hours": "sat,sun 00:00-24:00", "up": "2 Mbit/s"})
    write_limits(file, wanted)
    power_cut(file)
    assert read_limits(file) == wanted


def test_a_pause_goes_on(tmp_path: Path, power_cut: PowerCut) -> None:
    """The computer begins again by itself when there is power, and so does the daemon: not to work, then."""
    keep_pause(tmp_path, UserPause(until_unix_s=None, finish=False))
    power_cut(tmp_path / PAUSE)
    assert kept_pause(tmp_path) is not None


def test_a_yes_stays_one(tmp_path: Path, power_cut: PowerCut) -> None:
    """An empty file is refused, at every start, until somebody removes it."""
    keep_consent(tmp_path, "ab", Consent("tiny", 0.0, "hash"))
    power_cut(tmp_path / CONSENTS)
    assert "ab" in read_consents(tmp_path)


def test_thanks_stay(tmp_path: Path, power_cut: PowerCut) -> None:
    """A run may be over when there is power again: nobody says them once more."""
    kept = book(tmp_path)
    kept.take(signed(3))
    kept.save()
    power_cut(tmp_path / thanks.FILE)
    assert read_thanks(tmp_path / thanks.FILE).thanks.tasks == 3


def test_the_page_comes_back_where_it_was(tmp_path: Path, power_cut: PowerCut) -> None:
    """For the owner's bookmark."""
    keep_place(tmp_path, "http://127.0.0.1:8468/enter/token")
    power_cut(tmp_path / PLACE_FILE)
    assert kept_place(tmp_path).token == "token"


async def test_where_the_daemon_answers_can_be_read(
    tmp_path: Path, power_cut: PowerCut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By commands that look whether one of before is still there."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path / "settings"))
    door = await open_door(tmp_path)
    try:
        power_cut(tmp_path / CONTROL_FILE)
        tell_more(tmp_path, page="http://here")
        power_cut(tmp_path / CONTROL_FILE)
        assert json.loads((tmp_path / CONTROL_FILE).read_text())["page"] == "http://here"
    finally:
        await door.listener.aclose()
        door.close()

"""The owner's words: what is understood, what is written back, and the one sentence for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from node.commands.owner import limits as limits_command
from node.commands.owner import pause
from node.owner.limits import KEYS, OwnerLimits, read_limits, shown, with_value, write_limits
from node.owner.units import Hours, hours, show_size, size
from protocol.base.errors import BadInputError
from protocol.cli import main

DAY = 24 * 60


def test_what_it_keeps_to_is_all_told() -> None:
    """A yes was asked for beside a line that left out half of what its owner had set; the defaults stay short."""
    said = OwnerLimits().describe()
    assert said == (
        "only when you are not using the computer, not while a game runs, below 83 C, no limit up, no monthly quota"
    )
    for name, value, words in (
        ("other-cpu", "25 %", "not while others use over 25 % of the processor"),
        ("battery", "work", "also on battery,"),
        ("metered", "work", "also on a metered network,"),
        ("power", "150 W", "at most 150 W,"),
        ("gpu-memory", "6 GB", "at most 6 GB of GPU memory,"),
        ("memory", "4 GB", "at most 4 GB of memory,"),
        ("disk", "10 GB", "at most 10 GB of disk,"),
        ("down", "20 Mbit/s", "no limit up, 20 Mbit/s down,"),
        ("other-hours", "mon-fri 08:00-17:00", "other rates in other-hours (mon-fri 08:00-17:00),"),
    ):
        assert words in with_value(OwnerLimits(), name, value).describe()


WRONG = [
    ("up", "5 GB", "up: '5 GB' is no rate; write it as 20 Mbit/s, or off"),
    ("up", "5", "up: '5' is no rate"),
    ("up", "0", "up: '0' is no rate; write it as 20 Mbit/s, or off"),
    ("quota", " 0 ", "quota: ' 0 ' is no size; write it as 3 GB, or off"),
    ("down", "-3 Mbit/s", "down: '-3 Mbit/s' must be more than nothing"),
    ("other-up", "10 kbit/s", "other-up: '10 kbit/s' is too slow to keep a link alive"),
    ("other-down", "fast", "other-down: 'fast' is no rate"),
    ("quota", "200 Mbit/s", "quota: '200 Mbit/s' is no size; write it as 3 GB, or off"),
    ("memory", "-1 GB", "memory: '-1 GB' must be more than nothing"),
    ("gpu-memory", "lots", "gpu-memory: 'lots' is no size"),
    ("disk", "3 C", "disk: '3 C' is no size"),
    ("idle", "3 GB", "idle: '3 GB' is no time; write it as 3 min, or off"),
    ("idle", "-3 min", "idle: '-3 min' must be more than nothing"),
    ("cpu", "120 %", "cpu: '120 %' is more than all of it"),
    ("gpu", "0.5", "gpu: '0.5' is no share; write it as 80 %"),
    ("other-cpu", "-5 %", "other-cpu: '-5 %' must be more than nothing"),
    ("temperature", "181 F", "temperature: '181 F' is no temperature; write it as 80 C, or off"),
    ("temperature", "300 C", "temperature: '300 C' is no temperature that a device works at"),
    ("power", "150 C", "power: '150 C' is no power; write it as 150 W, or off"),
    ("battery", "maybe", "battery: 'maybe' is neither `pause` nor `work`"),
    ("metered", "3", "metered: '3' is neither `pause` nor `work`"),
    ("priority", "high", "priority: 'high' is neither `low` nor `normal`"),
    ("hours", "17:00-08:00", "hours: 17:00-08:00 ends before it starts; write `17:00-08:00 overnight` if"),
    ("hours", "08:00-08:00", "hours: 08:00-08:00 is no time at all; for a whole day write 00:00-24:00"),
    ("hours", "08:00-25:00", "hours: '25:00' is no time of day"),
    ("hours", "-5:00-8:00", "hours: '-5:00-8:00' is not a time until another; write it as 05:00-08:00, at most 24:00"),
    ("hours", "fri-mon 08:00-17:00", "hours: fri-mon ends before it starts; write fri-sun,mon"),
    ("hours", "sun-tue 08:00-17:00", "hours: sun-tue ends before it starts; write sun,mon-tue"),
    ("hours", "someday 08:00-17:00", "hours: 'someday 08:00-17:00' is no time"),
    ("hours", "xyz 08:00-17:00", "hours: 'xyz' is no day; days are mon, tue"),
    ("hours", "sat", "hours: 'sat' names days without a time"),
    ("hours", "08:00-17:00 overnight", "hours: 08:00-17:00 lies within one day; leave `overnight` out"),
    ("other-hours", "noon", "other-hours: 'noon' is no time"),
    ("while-not", "@gamez", "while-not: there is no list of programs '@gamez' (did you mean @games?)"),
    ("while-not", "a,,b", "while-not: '' is no program's name"),
    ("while-not", "-doom", "while-not: '-doom' leaves a program out of @games, which is not in this list"),
    ("while-not", "@games,-", "while-not: '-' leaves nothing out"),
    ("while-not", "@games,doom,-doom", "while-not: '-doom' leaves a program that the list also names out"),
    ("while-not", "/usr/bin/steam", "while-not: '/usr/bin/steam' is no program's name"),
    ("name", "x" * 41, "name: at most 40 letters"),
    ("upp", "5 Mbit/s", "limits: there is no 'upp' (did you mean up?)"),
]


@pytest.mark.parametrize(("name", "text", "sentence"), WRONG)
def test_what_cannot_be_is_one_sentence(name: str, text: str, sentence: str) -> None:
    """It names the limit, quotes what was written, and says how to write it."""
    with pytest.raises(BadInputError) as error:
        with_value(OwnerLimits(), name, text)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


NUMBERS = {
    "idle": "-3 min", "other-cpu": "-25 %", "cpu": "-50 %", "gpu": "-80 %", "gpu-memory": "-6 GB", "memory": "-4 GB",
    "disk": "-10 GB", "temperature": "-80 C", "power": "-150 W", "up": "-5 Mbit/s", "down": "-20 Mbit/s",
    "other-up": "-1 Mbit/s", "other-down": "-4 Mbit/s", "quota": "-200 GB",
}  # fmt: skip
"""Every limit that is an amount, below nothing."""


def test_the_command_line_refuses_each_with_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong units, amounts below nothing, hours that end before they start, unknown lists: the sentence alone, and no
    file is written."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    assert set(NUMBERS) == {key.name for key in KEYS if key.example.strip("@")[0].isdigit()}
    below = [(name, text, f"{name}: {text!r} must be more than nothing; write it as") for name, text in NUMBERS.items()]
    for name, text, sentence in [*WRONG, *below]:
        done = CliRunner().invoke(main, ["limits", "set", name, *text.split(" ")])
        assert (done.exit_code, done.output.count("\n")) == (2, 1) and done.output.startswith(sentence), done.output
    assert list(tmp_path.iterdir()) == []


def test_every_limit_has_a_wrong_value_above() -> None:
    """A limit that is added gets its sentence tried, too."""
    assert {name for name, _, _ in WRONG} >= {key.name for key in KEYS}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_limit_comes_back_as_it_was_written(key: object) -> None:
    """Its own example is understood, shown, and understood again as the same."""
    name, example = key.name, key.example  # type: ignore[attr-defined]
    once = with_value(OwnerLimits(), name, example)
    assert with_value(OwnerLimits(), name, shown(once)[name]) == once
    assert with_value(OwnerLimits(), name.replace("-", "_").upper(), example) == once


def test_the_file_keeps_all_of_it(tmp_path: Path) -> None:
    """Written with its explanations, read back equal; a slip in it names file and key."""
    path = tmp_path / "limits.toml"
    assert read_limits(path) == OwnerLimits()
    some = OwnerLimits()
    for key in KEYS:
        some = with_value(some, key.name, key.example)
    write_limits(path, some)
    assert read_limits(path) == some
    assert all(key.meaning in path.read_text() for key in KEYS)
    path.write_text('up = "5 apples"\n')
    with pytest.raises(BadInputError, match=r"limits\.toml: up: '5 apples' is no rate"):
        read_limits(path)
    path.write_text("up = 5\n")
    with pytest.raises(BadInputError, match="write the value with its unit"):
        read_limits(path)
    path.write_text("up = \n")
    with pytest.raises(BadInputError, match=r"limits\.toml: "):
        read_limits(path)


@pytest.mark.parametrize("left", [b"", b"\n", bytes(512)])
def test_an_empty_file_does_not_lift_every_limit(tmp_path: Path, left: bytes) -> None:
    """A power cut may leave nothing of it, or its length in zeros: its owner had limits, and is told that they are
    lost. Without a file nothing was ever set."""
    path = tmp_path / "limits.toml"
    path.write_bytes(left)
    with pytest.raises(BadInputError, match=r"limits\.toml: is empty, so your limits are lost; remove it"):
        read_limits(path)
    path.unlink()
    assert read_limits(path) == OwnerLimits()


def test_hours_of_the_week() -> None:
    """Days, ranges, nights and the end of the week; times are half open."""
    assert 0 in Hours() and 3 * DAY in hours("hours", "always")
    work = hours("hours", "mon-fri 08:00-17:00")
    assert 8 * 60 in work and 17 * 60 not in work and 4 * DAY + 16 * 60 in work and 5 * DAY + 9 * 60 not in work
    assert work.next_after(17 * 60) == 15 * 60
    assert work.next_after(4 * DAY + 17 * 60) == 63 * 60
    assert work.next_after(9 * 60) == 0
    night = hours("hours", "22:00-07:00 overnight")
    assert 23 * 60 in night and 6 * 60 in night and 12 * 60 not in night
    assert 6 * DAY + 23 * 60 in night and 6 * 60 in night
    mixed = hours("hours", "mon,wed 10:00-11:00; sat,sun 00:00-24:00")
    assert 10 * 60 in mixed and 2 * DAY + 10 * 60 in mixed and DAY + 10 * 60 not in mixed
    assert 5 * DAY in mixed and 7 * DAY - 1 in mixed


def test_the_command_reads_and_writes_without_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`limits set` and `limits get` work at any time; what is wrong changes nothing."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    run = CliRunner().invoke
    assert run(limits_command, ["set", "up", "5", "Mbit/s"]).output == "up = 5 Mbit/s\n"
    assert isinstance(run(limits_command, ["set", "up", "5", "apples"]).exception, BadInputError)
    assert run(limits_command, ["get", "up"]).output == "5 Mbit/s\n"
    lines = run(limits_command, []).output.splitlines()
    assert any(line.split()[:3] == ["up", "5", "Mbit/s"] for line in lines)
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)


def test_orders_without_a_daemon_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3 and a sentence; a wrong time is a usage error before anybody is asked."""
    monkeypatch.setenv("BARNRAISE_CONFIG", str(tmp_path))
    done = CliRunner().invoke(pause, [])
    assert done.exit_code == 3 and done.output == "No lent computer runs here: is `barnraise join` running?\n"
    wrong = CliRunner().invoke(pause, ["--for", "2 apples"])
    assert str(wrong.exception) == "--for: '2 apples' is no time; write it as 30 min or 2 h"


def test_what_a_game_is_is_said_where_limits_are_explained() -> None:
    """By the limit's own meaning, by the help, and where the option is: nobody could know what @games stands for."""
    (meaning,) = (key.meaning for key in KEYS if key.name == "while-not")
    for text in (meaning, *(CliRunner().invoke(main, [*words, "--help"]).output for words in (["limits"], ["join"]))):
        said = " ".join(text.split())
        assert "@games" in said and "lies in a game store's folder" in said and "on Windows, fills the screen" in said


@pytest.mark.parametrize("text", ["0.001 MB", "12.345678912 GB", "3 GB", "1.5 TB"])
def test_a_size_is_written_as_it_can_be_read_again(text: str) -> None:
    """A quota of 0.001 MB stood in the file as 1e-06 GB, which was refused, and the limits from before went on."""
    byte_count = size("quota", text)
    assert byte_count is not None
    assert size("quota", show_size(byte_count)) == pytest.approx(byte_count, abs=0.5)


def test_what_is_left_out_of_the_games_is_said_before_the_yes() -> None:
    """As what it is, and not as one more program for which it stops."""
    limits = with_value(OwnerLimits(), "while-not", "@games,steam,-wallpaper64,-obs64")
    assert "not while a game (but for wallpaper64, obs64) or steam runs" in limits.describe()

"""Thanks are what the run's coordinator has signed for this computer; nothing else is kept or shown."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from node.commands.owner import last_words
from node.commands.owner import thanks as thanks_command
from node.owner.tally import Given, as_dict, in_words, part_in_words, signed_in_words
from node.owner.thanks import FILE, ThanksBook, ThanksShelf, given_by, read_thanks, thanks_files
from node.platform.places import device_folder
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.trust.identity import Identity
from protocol.trust.membership import CREDENTIAL_LABEL
from protocol.trust.thanks import Thanks, open_thanks, sign_thanks

COORDINATOR, OTHER, ME = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
RUN = b"r" * 16


def signed(
    tasks: int, *, by: Identity = COORDINATOR, node: Identity = ME, run: bytes = RUN, name: str = "Ada"
) -> bytes:
    thanks = Thanks(
        run_id=run, run="tiny", node=node.node, name=name, tasks=tasks, tokens=256 * tasks, working_s=60 * tasks,
        since_unix_s=1_700_000_000, until_unix_s=1_700_009_000,
    )  # fmt: skip
    return sign_thanks(thanks, by)


def book(folder: Path) -> ThanksBook:
    return ThanksBook(folder, COORDINATOR.public_key, RUN, ME.node)


def test_what_is_signed_is_kept_and_shown(tmp_path: Path) -> None:
    """This visit begins with what the coordinator says first; `barnraise thanks` prints and checks what lies there."""
    kept = book(tmp_path)
    kept.take(signed(10))
    kept.take(signed(25))
    assert kept.visit is not None and kept.ever is not None
    assert (kept.visit.tasks, kept.ever.tasks, kept.ever.tokens) == (15, 25, 6400)
    kept.save()
    assert book(tmp_path).newest == kept.newest
    shown = CliRunner().invoke(thanks_command, ["--state", str(tmp_path)]).output
    assert "Ada has given the run tiny" in shown and "25 tasks accepted" in shown
    assert f"coordinator {COORDINATOR.node[:16]}" in shown and "The signature holds." in shown


def test_thanks_of_several_devices_are_one_sum(tmp_path: Path) -> None:
    """Each is signed for a key of its own, and lies in that one's folder; a device that has heard nothing adds none."""
    folders = [device_folder(tmp_path, place) for place in range(3)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    keys = (ME, OTHER, ME)
    shelf = ThanksShelf(
        [ThanksBook(folder, COORDINATOR.public_key, RUN, key.node) for folder, key in zip(folders, keys, strict=True)]
    )
    assert shelf.ever is None and shelf.visit is None
    shelf.take([signed(10), None, None])
    shelf.take([signed(25), signed(5, node=OTHER), None])
    shelf.take([signed(25), signed(8, node=OTHER), signed(99, node=OTHER)])
    assert shelf.ever is not None and shelf.visit is not None
    assert (shelf.ever.tasks, shelf.visit.tasks) == (33, 15 + 3) and "somebody else" in shelf.complaint
    assert shelf.ever.working_s == 60 * 25, "both had tasks in the same steps, whose time was told twice"
    shelf.save()
    assert thanks_files(tmp_path) == [folders[0] / FILE, folders[1] / FILE]
    shown = CliRunner().invoke(thanks_command, ["--state", str(tmp_path)]).output
    assert "25 tasks accepted" in shown and "8 tasks accepted" in shown
    (folders[0] / FILE).write_bytes(b"{")
    found = given_by(thanks_files(tmp_path))
    assert found is not None and found.tasks == 8, "one that is damaged takes nothing of the others along"


def test_a_first_visit_counts_from_nothing(tmp_path: Path) -> None:
    """News without thanks came first: there were none."""
    kept = book(tmp_path)
    kept.take(b"")
    kept.take(signed(5))
    assert kept.visit is not None and kept.visit.tasks == 5


@pytest.mark.parametrize(
    ("false", "why"),
    [
        (signed(99, by=OTHER), "did not sign"),
        (signed(99, node=OTHER), "for somebody else"),
        (signed(99, run=b"x" * 16), "for somebody else"),
        (signed(99)[:-1] + b"\0", "did not sign"),
        (b"x", "worth nothing"),
        (b"x" * 5000, "worth nothing"),
        (signed(99, name="\x1b[2J"), "canonical"),
    ],
)
def test_other_thanks_are_refused_and_named(false: bytes, why: str, tmp_path: Path) -> None:
    """Another key, computer or run, a changed byte, words that command a terminal: what was good before stays."""
    kept = book(tmp_path)
    kept.take(signed(3))
    kept.take(false)
    assert why in kept.complaint and kept.newest is not None and kept.newest.tasks == 3
    kept.save()
    assert read_thanks(tmp_path / FILE).thanks.tasks == 3


def test_a_damaged_file_is_named_and_comes_again(tmp_path: Path) -> None:
    """Nothing is guessed from it; the coordinator says it all again."""
    for content in (b"", b"{", b"[1]", msgspec.json.encode({"coordinator_key": OTHER.public_key, "signed": signed(3)})):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(BadInputError, match=FILE):
            read_thanks(tmp_path / FILE)
        kept = book(tmp_path)
        assert kept.newest is None and FILE in kept.complaint
        kept.take(signed(4))
        assert kept.complaint == ""


def test_thanks_are_no_credential() -> None:
    """The labels differ: what a coordinator signs as thanks opens no door, and a credential is no thanks."""
    body = signed(1)[:-64]
    with pytest.raises(RemoteProtocolError):
        open_thanks(body + COORDINATOR.sign(CREDENTIAL_LABEL + body), COORDINATOR.public_key)


def test_none_yet_is_a_sentence(tmp_path: Path) -> None:
    """Nothing was signed so far."""
    result = CliRunner().invoke(thanks_command, ["--state", str(tmp_path)])
    assert isinstance(result.exception, BadInputError) and "none were signed" in str(result.exception)


def test_the_two_counts_of_time_are_named_apart() -> None:
    """The computer counts the time in which it had work, the run the length of its steps: 2 and 5 minutes of the same
    visit stood beside each other as if they were the same."""
    own, signed = in_words(Given(2048.0, 8.0, 120.0)), signed_in_words(Given(2048.0, 8.0, 300.0))
    assert own == "8 tasks accepted, 2,048 tokens, 2 minutes of work"
    assert signed == "8 tasks accepted, 2,048 tokens, in steps of the run that took 5 minutes"
    assert in_words(Given(256.0, 1.0, 20.0)) == "1 task accepted, 256 tokens, less than a minute of work", "it was 0"
    assert in_words(Given()) == "0 tasks accepted, 0 tokens, 0 minutes of work"


def test_the_part_of_the_run_in_words() -> None:
    """As the owner reads it at the end."""
    assert part_in_words(0.012, 4209, 318) == "You computed 1.2 % of the last hour; step 4,210 holds 318 of your tasks."
    assert part_in_words(0.012, 4209, 0, "14:05") == "You computed 1.2 % of the hour before 14:05."
    assert part_in_words(0.0001, 7, 0) == "You computed less than 0.1 % of the last hour."


def test_who_gave_nothing_is_not_told_of_signatures(tmp_path: Path) -> None:
    """`leave` right after a start spoke of what the run "has not signed yet" where there was nothing to sign."""
    answer = {"begun": True, "ever": as_dict(Given()), "thanks": "Thank you. This visit: no task yet."}
    assert last_words(tmp_path, answer) == answer["thanks"]
    given_before = {**answer, "ever": as_dict(Given(tokens=64.0, tasks=2.0, working_s=1.0))}
    assert "The run has not signed any of it yet" in last_words(tmp_path, given_before)

"""What a newcomer reads when the way to the run fails: one sentence with what to do, for each cause."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from node.links.punch.punched import Puncher, PunchError
from node.measure.nat import Nat, advice
from node.visit.survey import what_to_do
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.cli import main
from protocol.drive.transport import CLOSED_IN_HANDSHAKE, other_version
from protocol.link.candidates import Candidate
from protocol.run.run import RunConfig
from protocol.trust.handshake import Initiator
from protocol.trust.identity import Identity
from protocol.trust.membership import Invite, JoinLink, check_not_over, sign_statement

ISSUER = Identity(bytes(32))
NOW_S = 1_763_800_000.0


def invite(not_after: float) -> Invite:
    return Invite(issuer=ISSUER.public_key, run_id=bytes(16), role="volunteer", uses=1, not_after=int(not_after),
                  nonce=bytes(16))  # fmt: skip


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (CLOSED_IN_HANDSHAKE, ("ask for a new one", "clock is wrong: it says 2025-11-22 08:26 UTC", "banned")),
        ("connection refused", ("is online", "a firewall must let outgoing TCP pass", "try again later")),
        ("no answer in time", ("is online", "coordinator is down")),
        (other_version(3, 2), ("install the newest Barnraise on this computer",)),
        (other_version(1, 2), ("install the newest Barnraise on the other side",)),
        ("", ("try again in a minute",)),
    ],
)
def test_a_coordinator_that_cannot_be_asked(failure: str, words: tuple[str, ...]) -> None:
    """Closed or used-up link, wrong clock, ban; no way there; another version; a link that just ended."""
    said = what_to_do(failure, NOW_S)
    assert all(word in said for word in words) and "\n" not in said


def test_an_expired_link_names_the_clock_and_the_remedy() -> None:
    """Whoever finds a link too old may also have a clock that is ahead."""
    with pytest.raises(BadInputError) as error:
        check_not_over(invite(NOW_S), NOW_S + 31 * 86400)
    assert "ran out 31 days ago by this computer's clock (is it right?); ask for a new one" in str(error.value)


def test_a_proxy_in_between_is_called_one() -> None:
    """An HTTP answer is no handshake message of 1213486160 bytes."""
    handshake = Initiator(
        identity=Identity(b"\1" * 32), credential=b"", run_id=bytes(16), peer=ISSUER.node, entropy=bytes(32),
        admit=lambda key, credential: "coordinator",
    )  # fmt: skip
    with pytest.raises(RemoteProtocolError, match="an HTTP server or proxy speaks there"):
        handshake.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_a_link_may_come_with_its_quotes(quote: str) -> None:
    """The Windows prompt hands single quotes on; zsh and PowerShell need them around brackets and commas."""
    link = JoinLink(("[::1]:8469", "127.0.0.1:8469"), sign_statement(invite(time.time() + 60), ISSUER))
    assert JoinLink.parse(f"{quote}{link}{quote}\n") == link


def test_the_operators_words_are_bounded_text(tmp_path: Path) -> None:
    """They stand above the question; too many, or ones that command a terminal, never leave the coordinator."""
    from protocol.run.run import DESCRIPTION_MAX, RunConfig

    RunConfig(description="x" * DESCRIPTION_MAX).validate()
    for wrong in ("x" * (DESCRIPTION_MAX + 1), "\x1b[2J", "a\nb"):
        with pytest.raises(BadInputError, match="description"):
            RunConfig(description=wrong).validate()


def test_a_network_without_udp_is_named_with_what_to_do() -> None:
    """In the log of the way that was tried, and by `barnraise netcheck`, which also says that nothing need be done."""
    servers, options = SimpleNamespace(stun=("203.0.113.1:3478",)), SimpleNamespace(lan=False, loopback=False)
    punched: Any = SimpleNamespace(_servers=lambda: servers, _options=options)
    gathered: Any = SimpleNamespace(candidates=(Candidate("host", bytes((192, 168, 1, 2)), 40000),))
    with pytest.raises(PunchError, match="no STUN server answered: the network here lets no UDP through"):
        Puncher._check_udp(punched, gathered)
    said = advice(Nat("no_udp"), ["tcp", "relay"], 0)
    assert said.startswith("You can join as it is: this network passes only TCP, so 1 of 2 servers is reached through")
    assert "allowing outgoing UDP would make the link direct" in said


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named_before_anybody_is_asked(tmp_path: Path) -> None:
    """What there is, and what to choose instead; with exit code 2, as every wrong word."""
    link = JoinLink(("127.0.0.1:9",), sign_statement(invite(time.time() + 60), ISSUER))
    arguments = ["join", str(link), "--yes", "--no-benchmark", "--state", str(tmp_path), "--device", "cuda:99"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2, done.output
    assert "--device cuda:99: there " in done.output and done.output.count("\n") == 1


def test_a_finished_run_starts_nothing_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a measurement nor a question; that is no failure."""
    link = JoinLink(("127.0.0.1:9",), sign_statement(invite(time.time() + 60), ISSUER))
    found = SimpleNamespace(finished=True, welcome=SimpleNamespace(config=RunConfig(name="tiny")))

    async def survey(*_: Any) -> Any:
        return found

    monkeypatch.setattr("node.visit.enquiry._survey", survey)
    monkeypatch.setattr("node.visit.enquiry.ask_device", lambda _: pytest.fail("it was measured"))
    monkeypatch.setattr("node.process.daemon.run_node", lambda _: pytest.fail("it was started"))
    done = CliRunner().invoke(main, ["join", str(link), "--yes", "--state", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, "The run tiny is finished: there is nothing left to do.\n")

"""How often a node tells the coordinator how it gets on."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from node.core import NodeMachine
from node.machine.facts import NodeFacts
from protocol.base.ids import NodeId
from protocol.base.machine import LinkUp, Received, Send
from protocol.messages import NodeReport, Welcome
from protocol.trust.membership import Trust
from tests.node.setting import make_config
from tests.protocol.samples import COORDINATOR as SIGNER
from tests.protocol.samples import RUN_ID

COORDINATOR = NodeId("c")


def reports(role: str, ping_s: float) -> list[float]:
    """When a node that has nothing else to say reports within its first minute."""
    machine = NodeMachine(
        NodeId("n"), NodeFacts(role=role, secret=bytes(32)), COORDINATOR, ("c:1",), count(1),
        Trust(RUN_ID, SIGNER.public_key),
    )  # fmt: skip
    machine.start(0.0)
    machine.handle(LinkUp(COORDINATOR, "coordinator"), 0.0)
    config = make_config()
    limits = msgspec.structs.replace(config.limits, ping_s=ping_s, silent_s=1000.0)
    config = msgspec.structs.replace(config, limits=limits)
    welcome = Welcome(membership=b"m", config=config, config_hash=config.config_hash(), vocabulary=259)
    machine.handle(Received(COORDINATOR, welcome), 0.0)
    times = []
    while (now := machine.wake_at()) is not None and now <= 60.0:
        effects = machine.wake(now)
        times += [now for effect in effects if isinstance(effect, Send) and isinstance(effect.message, NodeReport)]
    return times


@pytest.mark.parametrize("role", ["server", "volunteer", "auditor"])
def test_as_a_run_is_by_itself_everybody_reports_every_two_seconds(role: str) -> None:
    """The default of `limits.ping_s`."""
    assert reports(role, 2.0) == [float(second) for second in range(2, 61, 2)]


def test_who_computes_reports_no_more_often_than_it_is_asked_whether_it_lives() -> None:
    """A coordinator of ten thousand volunteers would do little else than read reports."""
    assert reports("volunteer", 15.0) == [2.0, 17.0, 32.0, 47.0]


def test_a_server_reports_every_two_seconds_however_seldom_links_are_asked() -> None:
    """Whether it hangs is told by that."""
    assert reports("server", 15.0) == [float(second) for second in range(2, 61, 2)]

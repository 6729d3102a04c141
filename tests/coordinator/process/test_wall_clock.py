"""The daemon sees that the wall clock was set, or that the computer slept; its machine dates by what is true now."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from coordinator.live.signals import Helpers
from coordinator.process.daemon import Daemon
from coordinator.process.discovery import Discovery
from coordinator.process.invites import join_links
from coordinator.process.metrics import coordinator_families
from coordinator.process.store import Store
from protocol.drive.metrics import Metrics
from protocol.drive.tcp import open_all_listeners
from protocol.messages import Welcome
from protocol.run.run import RunConfig, StagesSection
from protocol.trust.identity import Identity
from protocol.trust.membership import Membership, open_credential
from tests.coordinator.live.fake_node import PATIENCE_S, FakeNode

CONFIG = RunConfig(steps=5, stages=StagesSection(count=1))
SLEPT_S = 7200.0


class SetClock:
    """The wall clock of a computer, `ahead_s` of ours."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


async def test_a_member_that_joins_after_the_computer_slept_gets_a_membership_that_is_not_over(tmp_path: Path) -> None:
    """Two hours of the wall clock have passed and none of trio's. One that had joined before gets a new one unasked."""
    clock = SetClock()
    store = Store(tmp_path, CONFIG)
    identity = Identity(bytes(range(32)))
    listeners, [port] = await open_all_listeners((("127.0.0.1", 0),))
    link = join_links(store, identity, [f"127.0.0.1:{port}"], 2, clock())["server"]
    async with trio.open_nursery() as nursery:
        metrics = Metrics(*coordinator_families(CONFIG))
        daemon = Daemon(nursery, CONFIG, store, identity, metrics, Helpers(), link.addresses, clock)
        daemon.discovery = Discovery(daemon.machine, "", local=True)
        for task in (daemon.pump.run, daemon.write_records, daemon.refresh_gauges):
            nursery.start_soon(task)
        nursery.start_soon(daemon.transport.serve, listeners)

        def not_after(welcome: Welcome) -> float:
            membership = open_credential(welcome.membership, identity.public_key)
            assert isinstance(membership, Membership)
            return membership.not_after

        early, late = FakeNode(nursery, link, 10), FakeNode(nursery, link, 11)
        await early.join()
        assert not_after(await early.hears(Welcome)) < time.time() + SLEPT_S
        heard = len(early.heard)

        clock.ahead_s = SLEPT_S
        with trio.fail_after(PATIENCE_S):
            while daemon.machine.outbox.wall_offset_s + trio.current_time() < clock() - 1:
                await trio.sleep(0.01)
        await late.join()
        assert not_after(await late.hears(Welcome)) > clock()
        assert not_after(await early.hears(Welcome, heard)) > clock()
        nursery.cancel_scope.cancel()
    store.close()

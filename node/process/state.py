"""A node's state folder: what one life leaves for the next.

identity, journal (membership, run, plan, bans, ports) ─▶ NodeState ─▶ the daemon, and visits to a run
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import trio

from node.compute.checkpoint import run_folder, runs_in
from node.compute.doubts import doubted
from node.compute.object_store import StoreError
from node.compute.places import Place, place_of, soon
from node.compute.seals import look_at_checkpoints
from node.data.allowed import Allowed
from node.machine.kept_plan import KeptPlan
from node.machine.welcome import names_other_data
from node.process.crashes import Crashes
from node.process.journal import Journal
from protocol.base.errors import BadInputError, ProtocolError, RemoteProtocolError
from protocol.drive.addresses import reachable_addresses
from protocol.drive.keyfile import load_or_create_identity
from protocol.drive.tcp import open_all_listeners
from protocol.messages import PlanChanged, Welcome
from protocol.run.places import is_url
from protocol.run.run import RunConfig
from protocol.trust.identity import Identity
from protocol.trust.membership import MEMBERSHIP_S, JoinLink, Membership, Trust, check_not_over, open_credential


class NodeState:
    """The state folder: the identity, the membership, a server's journal; locked while the process lives."""

    def __init__(self, folder: Path, link: JoinLink, journal: Journal) -> None:
        self.folder = folder
        self.identity: Identity = load_or_create_identity(folder / "identity")
        self.journal = journal
        self._link = link
        known = journal.meta("run_id")
        if known is not None and known != link.run_id:
            raise BadInputError(f"{folder}: this state folder belongs to another run; name another with --state")
        if known is None:
            journal.set_meta("run_id", link.run_id)
        config = journal.meta("config")
        self.config = None if config is None else msgspec.msgpack.decode(config, type=RunConfig)
        self.membership = journal.meta("membership")
        if self.membership is None:
            check_not_over(link.statement, time.time())
        kept = journal.meta("plan")
        self.kept = None if kept is None else msgspec.msgpack.decode(kept, type=KeptPlan)
        """The plan that this node went by last."""
        self._vocabulary = 0 if self.kept is None else self.kept.vocabulary
        self.crashes = Crashes(journal)
        self._sockets: tuple[tuple[str, int], ...] = ()
        """(host, port) of the sockets that listen; a host may stand for all of this computer's."""
        self._announce: tuple[str, ...] = ()

    def credential(self) -> bytes:
        """What to show now: the membership once there is one, before that the link's invite."""
        return self._link.invite if self.membership is None else self.membership

    def clock_offset_s(self, welcome: Welcome) -> float | None:
        """Seconds from the coordinator's clock to ours, to a second: a new membership holds good for a known time from
        that clock on. None where the membership is not new, or not the coordinator's."""
        try:
            statement = open_credential(welcome.membership, self._link.coordinator_key)
        except ProtocolError:
            return None
        if isinstance(statement, Membership) and welcome.membership != self.membership:
            return time.time() - (statement.not_after - MEMBERSHIP_S)
        return None

    def keep(self, welcome: Welcome) -> None:
        """Keeps what the coordinator said, durably: the next start shows the membership and knows the run."""
        if welcome.membership != self.membership:
            self.membership = welcome.membership
            self.journal.set_meta("membership", welcome.membership)
        # While nobody has read the data, its operator may correct where it lies (`node.machine.welcome.why_not`).
        unread = self._vocabulary == 0 == welcome.vocabulary
        if self.config is None or (unread and names_other_data(self.config, welcome.config)):
            self.config = welcome.config
            self.journal.set_meta("config", msgspec.msgpack.encode(welcome.config))
            if self.kept is not None:
                self.kept = msgspec.structs.replace(self.kept, config=welcome.config)
                self.journal.set_meta("plan", msgspec.msgpack.encode(self.kept))

    def recall_bans(self, trust: Trust) -> None:
        """What was known of bans when the process ended; a coordinator that is away cannot tell it anew."""
        signed = self._bans = self.journal.meta("bans") or b""
        with contextlib.suppress(RemoteProtocolError):  # from before a change of its form: it comes again
            trust.revoke(signed)

    def has_news_of_bans(self, trust: Trust) -> bool:
        """Whether there is a list that a next start would not know."""
        return bool(trust.revocations_signed) and trust.revocations_signed != self._bans

    def keep_bans(self, trust: Trust) -> None:
        """Keeps the newest list for the next start, durably."""
        newest = trust.revocations_signed
        self.journal.set_meta("bans", newest)
        self._bans = newest

    def keep_plan(self, news: PlanChanged | Welcome) -> None:
        """Keeps the plan, durably, before the machine goes by it: no restart goes back to an older one."""
        if isinstance(news, Welcome):
            self._vocabulary = news.vocabulary
        if self.config is None or (self.kept is None and isinstance(news, Welcome)):
            return
        if self.kept is not None:
            kept = self.kept.after(news)
        else:
            assert isinstance(news, PlanChanged)
            kept = KeptPlan(
                config=self.config, vocabulary=self._vocabulary, plan=news.plan, stage=news.stage, reason=news.reason
            )
        if kept != self.kept:
            self.kept = kept
            self.journal.set_meta("plan", msgspec.msgpack.encode(kept))

    def checkpoints(self, place: Place | None, allowed: Allowed) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Complete checkpoints that this node can read, and sentences on those that are not complete.

        Where depends on the run. A node that has never been welcome does not know it: it looks into `place`.
        """
        try:
            if self.config is None:
                return ((), ()) if place is None else self._found(only_run(soon(place)))
            if not allowed.may_write(self.config):
                return (), ()  # the lane says so, and ends
            return self._found(run_folder(soon(place_of(self.folder, self.config)), self.config))
        except StoreError as error:  # which may be back before anybody asks
            return (), (str(error),)
        except OSError as error:  # a mount that is stale, away or closed to this user: as a store that is away
            return (), (f"the folder of checkpoints cannot be looked at: {error}",)

    def is_of_checkpoints(self, error: BaseException) -> bool:
        """Whether the system said it of where the run keeps its checkpoints: such a place comes back by itself, and
        says nothing of what this server has of its shard."""
        if isinstance(error, StoreError):
            return True
        if not isinstance(error, OSError) or not isinstance(error.filename, str) or self.config is None:
            return False
        folder = self.config.checkpoint.folder
        return not is_url(folder) and Path(error.filename).is_relative_to(self.folder / folder)

    def _found(self, folder: Place) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Nobody reads all at each start, before it dials anybody (128 GB a checkpoint for 8 B parameters at 16 bytes,
        times the servers of a folder that they share): those count whose parts are there. Each server reads its own
        part in full when it begins from one, and what it has found damaged is not named again (`doubts`)."""
        return look_at_checkpoints(folder, doubted(self.folder))

    async def listen(
        self, wanted: tuple[tuple[str, int], ...], announce: tuple[str, ...]
    ) -> tuple[list[trio.SocketListener], tuple[str, ...]]:
        """Listens where the options say; a port that the system chose once is taken again, so that others find us.

        Returns the sockets, and where others can dial this node, best first.
        """
        if not wanted:
            return [], ()
        keys = ["port" if place == 0 else f"port{place}" for place in range(len(wanted))]
        remembered = [
            (host, int(self.journal.meta(key) or 0) if port == 0 else port)
            for key, (host, port) in zip(keys, wanted, strict=True)
        ]
        try:
            listeners, ports = await open_all_listeners(remembered)
        except BadInputError:
            if remembered == list(wanted):
                raise
            listeners, ports = await open_all_listeners(wanted)
        for key, (_, asked), port in zip(keys, wanted, ports, strict=True):
            if asked == 0:
                self.journal.set_meta(key, str(port).encode())
        sockets = [(host, port) for (host, _), port in zip(wanted, ports, strict=True)]
        self._sockets, self._announce = tuple(sockets), announce
        return listeners, self.addresses()

    def addresses(self) -> tuple[str, ...]:
        """Where others can dial this node as it is now, best first: this computer's addresses come and go."""
        return reachable_addresses(self._sockets, self._announce) if self._sockets else ()


def only_run(place: Place) -> Place:
    """The one run whose checkpoints lie in `place` or below it. Raises `BadInputError` when there are several."""
    if isinstance(place, Path) and not place.is_dir():
        raise BadInputError(f"--checkpoints: {place} is no folder")
    runs = runs_in(place)
    if len(runs) > 1:
        raise BadInputError(f"--checkpoints: {place} holds {len(runs)} runs; name one: {runs[0]}, …")
    return runs[0] if runs else place

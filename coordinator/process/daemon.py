"""One coordinator as a process: the state folder, sockets, metrics, the API, and the machine in the middle.

    barnraise coordinator RUN.toml ─▶ run_coordinator ─▶ Pump(CoordinatorMachine) ◀─▶ links, database, /api, /metrics

It ends when it is told to (SIGTERM, Ctrl-C) or when its database fails: then it could promise nothing any more.
Whatever it had promised is on disk, so SIGKILL at any moment is no worse than a clean stop.
"""

from __future__ import annotations

import json
import os
import secrets
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import structlog
import trio

from coordinator.live.bans import why_no_lineage
from coordinator.live.core import CoordinatorMachine
from coordinator.live.crediting import credit_ledger
from coordinator.live.draining import why_no_drain
from coordinator.live.orders import Ban, DrainNode, NameNode, Order
from coordinator.live.outbox import EVERYDAY_EVENTS
from coordinator.live.records import Record, StepRow
from coordinator.live.signals import Helpers
from coordinator.live.view import members, overview
from coordinator.process.database import PostgresDatabase, StateBrokenError, StateLockedError
from coordinator.process.discovery import Discovery
from coordinator.process.http import build_app, build_public_app
from coordinator.process.invites import join_links, new_invite
from coordinator.process.metrics import coordinator_families, first_values, refresh
from coordinator.process.ordering import (
    change_run,
    go_back,
    order_durably,
    pause_run,
    replan_run,
    roll_back,
    voiding_of,
)
from coordinator.process.papers import LINKS, announce, write_private
from coordinator.process.planner import ask_planner
from coordinator.process.sockets import listen, serve
from coordinator.process.store import Event, Store, StoredInvite
from coordinator.process.timeline import Timeline
from coordinator.process.tracking import History, start_trackers
from coordinator.tracking.feed import Segments
from coordinator.tracking.trackers import Target
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.limits import CLOSE_S
from protocol.base.loading import keep_what_is_loaded
from protocol.base.machine import (
    Compute,
    Count,
    Dial,
    DropTensors,
    HangUp,
    LinkDown,
    LinkUp,
    Log,
    Ordered,
    Persist,
    Persisted,
    PlanReady,
    Prune,
    Received,
    Send,
    ShareTensor,
    StartPlanning,
    WallClockMoved,
)
from protocol.drive.addresses import host_port, is_loopback, reachable_addresses
from protocol.drive.keyfile import load_or_create_identity
from protocol.drive.metrics import Metrics
from protocol.drive.process import set_up_logging, watch_loop, watch_signals, write_log
from protocol.drive.pump import Pump
from protocol.drive.scrape import COORDINATOR_PORTS, open_metrics
from protocol.drive.stun import StunResponder
from protocol.drive.transport import PATHS, Link, Transport
from protocol.link.reach import split
from protocol.messages import Message
from protocol.run.changes import RunChange
from protocol.run.run import STAGES_MAX, RunConfig
from protocol.schedule.profile import NetworkFile
from protocol.trust.credit import sign_credit
from protocol.trust.identity import SIGNATURE_BYTES, Identity
from protocol.trust.membership import (
    Invite,
    JoinLink,
    JoinRole,
    Membership,
    Revocations,
    Trust,
    open_credential,
    sign_statement,
)
from protocol.trust.thanks import Thanks, sign_thanks
from protocol.trust.voided import VoidList, sign_voided

IDENTITY = "identity"
LINK_FILE = "{role}.link"
"""A file with the one link of a role: what `barnraise server FILE` takes, so that no process list shows the link."""
DEFAULT_HTTP = ("127.0.0.1", 8470)
REFRESH_S = 1.0
"""Between two settings of the gauges; Prometheus asks every 15 s or so."""
CLOCK_MOVED_S = 1.0
"""A difference that no reading of two clocks one after the other makes, and that no lifetime minds."""
COLLECT_AFTER = 20_000
"""Several times the objects of an answer about a thousand members; as much garbage may lie about, some megabytes."""
STEP_LINES_S = 5.0
"""Between two lines about steps on a terminal: what has to be copied from there must not scroll away."""
STANDBY_LOOK_S = 1.0
"""Between two looks at the lock of the run: with the 10 s after which a dead computer's session ends, and two seconds
to start, another one has the run within 15 s."""
WRITE_BATCH_MAX = 1024
"""Records of one transaction: a burst of joins is one fsync, and still well under a tenth of a second."""


T = TypeVar("T")


@dataclass(frozen=True)
class CoordinatorOptions:
    """What the command line says. Addresses are (host, port); port 0 lets the system choose."""

    state: Path
    listen: tuple[tuple[str, int], ...]
    announce: tuple[str, ...] = ()
    http: tuple[str, int] | None = None
    """None: the default port, or any free one when it is taken."""
    metrics: tuple[str, int] | None = None
    """Where `/metrics` answers, or `OFF`; None: on loopback, at the default port or any free one."""
    page: tuple[str, int] | None = None
    """Where everybody may read the live page; None: only where the API is."""
    json: bool = False
    helpers: Helpers = field(default_factory=Helpers)
    store: str = ""
    """Where the record is, `postgresql://…`; empty: in a file of the state folder."""
    standby: bool = False
    """Whether to wait while another coordinator has the run."""
    trackers: tuple[Target, ...] = ()
    """Where else the run's numbers go."""


def run_coordinator(config: RunConfig, options: CoordinatorOptions) -> str:
    """Runs until it is told to stop; returns the reason.

    Raises:
        BadInputError: an address or the state folder does not fit.
        StateLockedError: another coordinator has the state folder.
        StateBrokenError: the database failed.
    """
    metrics = Metrics(*coordinator_families(config))
    started = time.perf_counter()
    store = _open_store(config, options)
    try:
        metrics.record(
            "barnraise_coordinator_db_query_duration_seconds", time.perf_counter() - started, operation="open"
        )
        seldom = {"step": STEP_LINES_S}
        as_json = True if options.json else None
        set_up_logging(metrics, json=as_json, seldom=seldom, role="coordinator", run=config.name)
        if store.adopted:
            structlog.get_logger().warning(
                "configuration changed", detail=f"nothing was computed by it yet: {'; '.join(store.adopted)}"
            )
        keep_what_is_loaded(COLLECT_AFTER)
        return trio.run(_run, config, options, store, metrics)
    except BaseExceptionGroup as group:
        _raise_first(group)
    finally:
        store.close()


def _open_store(config: RunConfig, options: CoordinatorOptions) -> Store:
    """The run's record; with `standby`, when whoever has it lets go of it or dies."""
    said = ""
    while True:
        try:
            if not options.store:
                return Store(options.state, config)
            identity = _shared_identity(options)
            return Store(options.state, config, PostgresDatabase(options.store, config.name), identity.public_key)
        except (StateLockedError, StateBrokenError) as error:
            if not options.standby:
                raise
            if str(error) != said:
                said = str(error)
                words = "another coordinator has the run" if isinstance(error, StateLockedError) else said
                click.echo(f"standing by: {words}; looking again every {STANDBY_LOOK_S:g} s", err=True)
        time.sleep(STANDBY_LOOK_S)


def _shared_identity(options: CoordinatorOptions) -> Identity:
    """The key that all coordinators of a run share. Raises `BadInputError` where it is missing."""
    path = options.state / IDENTITY
    if options.standby and not path.exists():
        raise BadInputError(
            f"{path}: a coordinator that stands by needs the run's key: copy this file from the state folder of the"
            " other one, and keep it as secret"
        )
    try:
        options.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StateBrokenError(f"{options.state}: cannot be used as state folder: {error.strerror}") from error
    return load_or_create_identity(path)


def _raise_first(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """A nursery wraps what failed in groups; the one failure that has a sentence comes out alone."""
    named = group.subgroup((BadInputError, StateBrokenError))
    error: BaseException = group if named is None else named
    while named is not None and isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    raise error


async def _run(config: RunConfig, options: CoordinatorOptions, store: Store, metrics: Metrics) -> str:
    identity = load_or_create_identity(store.folder / IDENTITY)
    listeners, ports = await listen(options.listen)
    sockets = [(host, port) for (host, _), port in zip(options.listen, ports, strict=True)]
    addresses = reachable_addresses(sockets, options.announce)
    places = (config.stages.count or STAGES_MAX) * (config.stages.front_servers + config.stages.back_servers)
    links = join_links(store, identity, addresses, places, time.time())
    async with trio.open_nursery() as nursery:
        helpers = options.helpers
        if not helpers.stun:
            helpers = replace(helpers, stun=split(addresses)[0])  # we answer there ourselves
        daemon = Daemon(nursery, config, store, identity, metrics, helpers, addresses)
        await nursery.start(watch_signals, daemon.pump.put)
        nursery.start_soon(watch_loop, metrics)
        admin_token = secrets.token_hex(16)
        web = await _serve_http(nursery, daemon, metrics, options.http, admin_token)
        public = await _serve_page(nursery, daemon, metrics, options.page) if options.page is not None else ""
        scrape = open_metrics(metrics, store.folder, options.metrics, COORDINATOR_PORTS, {"role": "coordinator"})
        local = all(is_loopback(host) for host, _ in options.listen)
        daemon.discovery = Discovery(daemon.machine, scrape.target if scrape is not None else "", local=local)
        papers = {
            "run": config.name,
            "run_id": store.run_id.hex(),
            "server": str(links["server"]),
            "volunteer": str(links["volunteer"]),
            "listen": host_port(*sockets[0]),
            "http": web,
            "page": public or web,
            "metrics": scrape.url if scrape is not None else "",
            "state": str(store.folder.resolve()),
            "pid": os.getpid(),
            "admin_token": admin_token,
        }
        for role, join_link in links.items():
            write_private(store.folder / LINK_FILE.format(role=role), f"{join_link}\n")
        write_private(store.folder / LINKS, json.dumps(papers, indent=2) + "\n")
        if is_loopback(urllib.parse.urlsplit(web).hostname or ""):
            daemon.links_file = str((store.folder / LINKS).resolve())
        announce(papers, as_json=options.json, machine=daemon.machine)
        nursery.start_soon(daemon.write_records)
        nursery.start_soon(daemon.refresh_gauges)
        nursery.start_soon(daemon.transport.serve, listeners)
        nursery.start_soon(StunResponder().serve, listeners)
        followed = History(daemon.steps, daemon.segments, lambda: daemon.machine.history.batches)
        start_trackers(nursery, options.trackers, config, store, followed)
        reason = await daemon.pump.run()
        await daemon.say_goodbye()
        nursery.cancel_scope.cancel()
        if scrape is not None:
            scrape.close()
    return reason


class Daemon:
    """Performs the machine's effects, and tells it what happens on the links and the disk."""

    def __init__(
        self,
        nursery: trio.Nursery,
        config: RunConfig,
        store: Store,
        identity: Identity,
        metrics: Metrics,
        helpers: Helpers,
        addresses: Sequence[str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`addresses`: where others reach this coordinator, for the links of new invites. `wall_clock`: in seconds
        since 1970; it may be set at any time."""
        self._wall_clock = wall_clock
        self._nursery = nursery
        self._identity = identity
        self._addresses = tuple(addresses)
        self.links_file = ""
        """Where the join links lie, for the status; only set where the API is open to this computer alone. The links
        themselves are secrets: whoever may read the file has them."""
        self.discovery: Discovery
        """Whom Prometheus should ask; set once it is known where our own metrics answer."""
        self._store = store
        self._metrics = metrics
        self._logger = structlog.get_logger()
        self._disk = trio.CapacityLimiter(1)
        self._segments: tuple[tuple[int, int], Segments] = ((-1, -1), ())
        self._unwritten: list[tuple[int, Record | Event]] = []
        """Records and events in their order; an event has the number -1 and is acknowledged to nobody."""
        self._to_write = trio.Event()
        self._wall_offset_s = wall_clock() - trio.current_time()
        trust = Trust(store.run_id, identity.public_key, issuer=True)

        def read_invite(credential: bytes) -> Invite | None:
            statement = open_credential(credential, identity.public_key)
            return statement if isinstance(statement, Invite) else None

        def sign(membership: Membership) -> bytes:
            return sign_statement(membership, identity)

        def sign_list(revocations: Revocations) -> bytes:
            return sign_statement(revocations, identity)[-SIGNATURE_BYTES:]

        def sign_given(thanks: Thanks) -> bytes:
            return sign_thanks(thanks, identity)

        self.machine = CoordinatorMachine(
            config, store.run_id, store.generation, store.load(), sign, sign_list, sign_given,
            self._wall_offset_s, read_invite, helpers,
        )  # fmt: skip
        self.machine.bulletin.build = f"barnraise-{version('barnraise')}"
        self.pump = Pump(self.machine, self)
        self.timeline = Timeline(self.machine, self.pump)
        self.transport = Transport(
            nursery,
            identity=identity,
            role="coordinator",
            run_id=store.run_id,
            credential=lambda: b"",
            admit=lambda public_key, credential: trust.admit(public_key, credential, wall_clock()),
            events=self,
        )
        first_values(metrics, self.machine)
        refresh(metrics, self.machine, trio.current_time())

    # ---- effects -----------------------------------------------------------------------------------------------

    def send(self, effect: Send) -> None:
        link = self.transport.link_to(effect.peer)
        if link is not None:
            link.send(effect.message)

    def hang_up(self, effect: HangUp) -> None:
        link = self.transport.link_to(effect.peer)
        if link is not None:
            link.close(effect.reason)
            if effect.fault:
                link.at_fault()

    def persist(self, effect: Persist) -> None:
        self._unwritten.append((effect.record_number, effect.record))
        self._to_write.set()

    def log(self, effect: Log) -> None:
        write_log(self._logger, effect)
        self.timeline.said(effect)
        if effect.event not in EVERYDAY_EVENTS:
            event = Event(round(self._wall_clock(), 3), effect.level, effect.event, effect.fields)
            self._unwritten.append((-1, event))
            self._to_write.set()

    def count(self, effect: Count) -> None:
        self._metrics.apply(effect)

    def start_planning(self, effect: StartPlanning) -> None:
        self._nursery.start_soon(self._plan, effect)

    async def _plan(self, effect: StartPlanning) -> None:
        began_s = trio.current_time()
        answer = await ask_planner(effect.problem)
        self.timeline.ended("plan", answer.sentence, began_s)
        self.pump.put(PlanReady(effect.number, answer.proposal, answer.sentence))

    def _never(self, effect: Dial | Compute | Prune | DropTensors | ShareTensor) -> None:
        raise AssertionError(f"a coordinator does not order {effect!r}")

    dial = compute = prune = drop_tensors = share_tensor = _never

    async def write_records(self) -> None:
        """Writes what waits, in order; all that gathers during one write shares the next. Raises `StateBrokenError`."""
        while True:
            await self._to_write.wait()
            self._to_write = trio.Event()
            while self._unwritten:
                batch = self._unwritten[:WRITE_BATCH_MAX]
                del self._unwritten[:WRITE_BATCH_MAX]
                await self._in_thread("write", partial(self._store.write, [item for _, item in batch]))
                for number, _ in batch:
                    if number >= 0:
                        self.pump.put(Persisted(number))

    async def _in_thread(self, operation: str, work: Callable[[], T]) -> T:
        """Blocking work on the database, one at a time."""
        started = trio.current_time()
        result = await trio.to_thread.run_sync(work, limiter=self._disk)
        self.timeline.ended("database", operation, started)
        self._metrics.record(
            "barnraise_coordinator_db_query_duration_seconds", trio.current_time() - started, operation=operation
        )
        return result

    # ---- links -------------------------------------------------------------------------------------------------

    def on_up(self, link: Link) -> None:
        self._metrics.record("barnraise_transport_connects_total", path=link.path, outcome="ok")
        self.pump.put(LinkUp(link.peer, link.role, link.public_key, link.credential, link.address))

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        await self.pump.room()
        if not link.closing:
            self.pump.put(Received(link.peer, message))

    def on_down(self, link: Link, reason: str) -> None:
        self.pump.put(LinkDown(link.peer, reason))

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        self._metrics.record("barnraise_transport_rejected_messages_total", count, reason=reason)
        more = {"count": count} if count > 1 else {}
        self._logger.warning("peer refused", address=address, reason=reason, detail=detail, **more)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        self._metrics.record("barnraise_transport_bytes_total", byte_count, direction=direction, kind=kind)
        self._metrics.record("barnraise_transport_messages_total", message_count, direction=direction, kind=kind)

    async def say_goodbye(self) -> None:
        """Lets the last words leave, then ends every link."""
        for link in self.transport.links:
            link.close("the coordinator stops")
        with trio.move_on_after(CLOSE_S):
            while self.transport.links:
                await trio.sleep(0.01)

    # ---- what others ask for -----------------------------------------------------------------------------------

    def look_at_clock(self) -> None:
        """Tells the machine when the wall clock was set, or stood still with this computer: a membership that is dated
        by what it was at the start has run out before anybody gets it."""
        offset_s = self._wall_clock() - trio.current_time()
        if abs(offset_s - self._wall_offset_s) > CLOCK_MOVED_S:
            self._wall_offset_s = offset_s
            self.pump.put(WallClockMoved(offset_s))

    async def refresh_gauges(self) -> None:
        while True:
            self.look_at_clock()
            refresh(self._metrics, self.machine, trio.current_time())
            self.discovery.look()
            paths = [link.path for link in self.transport.links]
            for path in PATHS:
                self._metrics.record("barnraise_transport_connections", paths.count(path), path=path)
            await trio.sleep(REFRESH_S)

    def status(self) -> dict[str, Any]:
        return {**self.machine.status(trio.current_time()), "links_file": self.links_file}

    def scrape_targets(self) -> list[dict[str, Any]]:
        return self.discovery.targets()

    def overview(self) -> dict[str, Any]:
        return {**overview(self.machine, trio.current_time()), "timeline_wall_s": self.timeline.pictured_wall_s}

    def picture(self) -> bytes:
        return self.timeline.picture

    def members(self, *, whole_ids: bool) -> list[dict[str, Any]]:
        return members(self.machine, trio.current_time(), whole_ids=whole_ids)

    async def curve(self, points: int) -> list[Any]:
        return await self._in_thread("read", partial(self._store.curve, points))

    async def validations(self, count_max: int) -> list[Any]:
        return await self._in_thread("read", partial(self._store.validation_points, count_max))

    def network(self) -> NetworkFile:
        return self.machine.network_file(trio.current_time())

    async def steps(self, first: int, count_max: int) -> Sequence[StepRow]:
        return await self._in_thread("read", partial(self._store.steps_from, first, count_max))

    async def segments(self) -> Segments:
        """As `Store.segments`; they change only when the run goes back, or a first step of new ledgers closes."""
        history = self.machine.history
        newest = history.tail[-1].ledger_generation if history.tail else -1
        if self._segments[0] != (history.rollback_count, newest):
            self._segments = (history.rollback_count, newest), await self._in_thread("read", self._store.segments)
        return self._segments[1]

    async def order(self, order: Order) -> None:
        await order_durably(self.machine, self.pump, order)

    async def ban(self, node: NodeId, reason: str, lineage: bool) -> tuple[NodeId, ...]:
        machine = self.machine
        nodes = machine.admission.lineage(node) if lineage else (node,)
        if lineage and (no := why_no_lineage(nodes, machine.roster, machine.placement.table)):
            raise BadInputError(f"{node[:8]}: {no}")
        await self.order(Ban(node, reason, lineage))
        return nodes

    async def change(self, key: str, value: str) -> RunChange:
        _check_begun(self.machine)
        return await change_run(self.machine, self.pump, key, value)

    async def replan(self, settings: list[str]) -> tuple[RunChange, str]:
        _check_begun(self.machine)
        return await replan_run(self.machine, self.pump, settings)

    async def pause(self, paused: bool) -> None:
        _check_begun(self.machine)
        await pause_run(self.machine, self.pump, paused)

    def drain(self, node: NodeId, reason: str) -> str:
        no = why_no_drain(self.machine.roster, self.machine.placement.table, node)
        if not no:
            self.pump.put(Ordered(DrainNode(node, reason)))
        return no

    async def name(self, node: NodeId, name: str) -> str:
        name = self.machine.naming.checked(node, name)
        await self.order(NameNode(node, name))
        return name

    async def roll_back(self, step: int) -> int:
        _check_begun(self.machine)
        return await roll_back(self.machine, self.pump, step)

    async def void(self, node: NodeId, reason: str, lineage: bool, from_start: bool) -> dict[str, Any]:
        _check_begun(self.machine)
        nodes = self.machine.admission.lineage(node) if lineage else (node,)
        order = voiding_of(self.machine, nodes, reason, from_start, self._wall_clock())
        lost_steps = await go_back(self.machine, self.pump, order)
        first = 0 if order.voiding is None else order.voiding.first_step
        return {"voided": nodes, "first_step": first, "step": order.step, "lost_steps": lost_steps}

    async def voided(self) -> bytes:
        rows = tuple(await self._in_thread("read", self._store.voided))
        run, run_id = self.machine.config.name, self.machine.run_id.hex()
        done = VoidList(run=run, run_id=run_id, written_unix_s=int(self._wall_clock()), rows=rows)
        return sign_voided(done, self._identity)

    async def trace(self, seconds: float) -> dict[str, Any]:
        return await self.timeline.trace(seconds)

    def credit(self) -> bytes:
        machine = self.machine
        servers = machine.placement.plan.server_nodes() if machine.placement.plan is not None else ()
        ledger = credit_ledger(
            machine.config, machine.run_id, machine.giving, machine.admission, servers, self._wall_clock()
        )
        return sign_credit(ledger, self._identity)

    async def invites(self) -> Sequence[StoredInvite]:
        return await self._in_thread("read", self._store.invites)

    async def invite(self, role: JoinRole, uses: int, days: float) -> tuple[StoredInvite, JoinLink]:
        invite = new_invite(self._store.run_id, self._identity, role, uses, self._wall_clock(), days * 86400)
        await self._in_thread("write", partial(self._store.add_invite, invite))
        return invite, JoinLink(self._addresses, invite.signed)


# ---- pages ----------------------------------------------------------------------------------------------------------


async def _serve_http(
    nursery: trio.Nursery, daemon: Daemon, metrics: Metrics, asked: tuple[str, int] | None, admin_token: str
) -> str:
    """Starts the API; returns its address as a URL."""
    host, port = asked or DEFAULT_HTTP
    app = build_app(daemon, metrics, host=host, admin_token=admin_token)
    return await serve(nursery, app, "--http", host, *((port, 0) if asked is None else (port,)))


async def _serve_page(nursery: trio.Nursery, daemon: Daemon, metrics: Metrics, asked: tuple[str, int]) -> str:
    """Starts the page that everybody may read; returns its address as a URL."""
    return await serve(nursery, build_public_app(daemon, metrics), "--page", *asked)


def _check_begun(machine: CoordinatorMachine) -> None:
    """Raises `BadInputError` where there is nothing to change: the run has no plan yet, or is over."""
    if machine.finished:
        raise BadInputError("the run is finished")
    if machine.placement.plan is None:
        raise BadInputError("no step was planned yet: edit RUN.toml and start the coordinator again")

"""One node as a process: identity, membership, sockets, lanes, journal, counters, and the machine in the middle.

    barnraise server LINK / barnraise join LINK ─▶ run_node ─▶ Pump(NodeMachine) ◀─▶ Driver ◀─▶ links, lanes, disk

It ends when the machine says `Exit`: the run is finished, the owner asked for it, or something is wrong that has a
name. Whatever happens, every child task and every link ends with it.
"""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import structlog
import trio

from node.compute.devices.choice import DeviceChoice
from node.compute.places import Place
from node.core import NodeMachine
from node.data.allowed import Allowed
from node.links.assemble import WayOptions, assemble
from node.links.callee import Surroundings
from node.links.relay.relayed import Proof
from node.links.router.port_mapping import forwardable_port
from node.links.whereabouts import OwnPlaces
from node.machine.facts import NodeFacts
from node.machine.records import Record
from node.measure.meter import Figures
from node.owner.limits import OwnerLimits
from node.platform.places import device_folder, note_process
from node.process.cards import Cards
from node.process.device_start import DeviceOptions
from node.process.driver import Driver
from node.process.ends import GOOD_ENDS, end_in_words
from node.process.journal import Journal, JournalError, JournalWriter
from node.process.lend import lend
from node.process.link_options import incoming_bytes, link_options
from node.process.metrics import NodeMetrics
from node.process.quota_pause import live
from node.process.sampler import checkpoints_to_read, tell_samples
from node.process.starting import Starting
from node.process.state import NodeState
from node.process.store import StoreFullError, TensorStore
from node.server.tickets import KEY_BYTES
from node.volunteer.allowances import AS_BEFORE, LITTLE_WORK, NO_WORK
from protocol.base.errors import BadInputError
from protocol.base.ids import NodeId
from protocol.base.loading import keep_what_is_loaded, loading
from protocol.base.machine import AddressesChanged, CheckpointsFound, Told
from protocol.drive.limits import Limits, LineLimits
from protocol.drive.process import set_up_logging, watch_loop, watch_signals
from protocol.drive.pump import Pump
from protocol.drive.scrape import NODE_PORTS, Scrape, open_metrics
from protocol.drive.stun import StunResponder
from protocol.drive.transport import Transport
from protocol.link.budget import Budget
from protocol.link.reach import split
from protocol.messages import Message, PlanChanged, Welcome
from protocol.run.run import RunConfig
from protocol.trust.membership import JoinLink, Trust
from protocol.trust.seals import Sealer

BUILD = f"barnraise-{version('barnraise')}"
PORT_MAX = 65535
CLOSE_LINKS_S = 2.0
"""How long a node that ends waits for its last words to leave."""
SELDOM = {NO_WORK: 300.0, LITTLE_WORK: 300.0, AS_BEFORE: 300.0, "no way to a peer": 60.0}
"""Seconds between two lines of an event on a terminal; where nobody looks, each is written."""
DETAIL = {"no way to a peer": "ways"}
"""What a terminal has no room for: every way with its reason takes six lines, for every peer."""


@dataclass(frozen=True)
class NodeOptions:
    """What the command line says. Addresses are (host, port); port 0 lets the system choose."""

    link: JoinLink
    state: Path
    listen: tuple[tuple[str, int], ...] = ()
    """Where others may dial this node: a server is there to be reached, a volunteer usually cannot be."""
    announce: tuple[str, ...] = ()
    """Addresses to tell others instead of those of this machine's interfaces."""
    metrics: tuple[str, int] | None = None
    """Where `/metrics` answers, or `OFF`; None: on loopback, at a port that is found in the state folder."""
    threads: int = 1
    device: DeviceChoice = field(default_factory=DeviceChoice)
    further: tuple[tuple[DeviceChoice, float], ...] = ()
    """A volunteer's further devices, each with its speed as `tokens_per_s`: members of the run beside the first one."""
    stage: int = -1
    computes: bool = True
    tokens_per_s: float = 0.0
    measured: tuple[tuple[NodeId, str, Figures], ...] = ()
    """(server, path, figures) of the links that were measured before the owner was asked."""
    allowed: Allowed = field(default_factory=Allowed)
    """What the run may read and write of a server's machine."""
    checkpoints: Place | None = None
    """Where a fresh server finds the checkpoints of a run that it does not know yet."""
    limits: LineLimits = field(default_factory=LineLimits)
    page: bool = True
    """Whether a volunteer serves its owner's page on loopback."""
    page_token: str = ""
    """Of the page on which the owner said yes, which this one goes on with."""
    page_port: int = 0
    """… and at this port, where the owner's browser waits; 0: the usual one."""
    overrides: tuple[tuple[str, str], ...] = ()
    """(limit, value) of a volunteer's command line, for this process alone."""
    ways: WayOptions = field(default_factory=WayOptions)
    starting: Starting | None = None
    """What hears a volunteer's owner until its keeper does."""

    def by_device(self) -> list[NodeOptions]:
        """Those of each device's member. All have one line; a port that was named is the first one's, and so are the
        addresses that were announced: the others listen at any port of the same interfaces."""
        count = 1 + len(self.further)
        measured = tuple((server, path, figures.shared_by(count)) for server, path, figures in self.measured)
        first = replace(self, further=(), measured=measured)
        each = [first]
        for place, (device, tokens_per_s) in enumerate(self.further, 1):
            metrics = self.metrics
            if metrics is not None and metrics[1] != 0:  # else none at all, or wherever there is room
                metrics = (metrics[0], min(metrics[1] + place, PORT_MAX))
            each.append(
                replace(
                    first,
                    state=device_folder(self.state, place),
                    device=device,
                    tokens_per_s=tokens_per_s,
                    listen=tuple(dict.fromkeys((host, 0) for host, _ in self.listen)),
                    announce=(),
                    metrics=metrics,
                )
            )
        return each


def run_node(options: NodeOptions) -> int:
    """Runs until the machine ends; returns the exit code: 0 for an end in peace, 1 with a reason in the log.

    Raises:
        BadInputError: the state folder, an address, the link or the device cannot be used.
    """
    log = structlog.get_logger("node")
    if options.link.role != "volunteer":  # whose device has a process of its own: no torch in its daemon
        with loading():
            from node.process.own_lanes import find_device

        if options.computes:
            find_device(options.device)
    keep_what_is_loaded()
    try:
        reason = trio.run(_run, options)
    except (JournalError, StoreFullError) as error:
        return _stopped(error)
    except BaseExceptionGroup as group:
        named = group.subgroup((JournalError, StoreFullError, BadInputError))
        if named is None:
            raise
        first: BaseException = named
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, BadInputError):  # one sentence, and an exit status with which nobody tries again
            raise first from None
        return _stopped(first)
    log.info("ended", reason=reason, detail=end_in_words(reason, options.link.role))
    return 0 if reason in GOOD_ENDS else 1


def _stopped(error: BaseException) -> int:
    """Nothing may go on without a journal or without memory; the journal has everything for the next start."""
    if isinstance(error, JournalError) and error.reason == "locked":
        raise BadInputError(f"{error}; name another with --state") from error
    reason = error.reason if isinstance(error, JournalError) else "memory"
    structlog.get_logger("node").critical("stopped", reason=reason, detail=str(error))
    return 1


@dataclass(frozen=True)
class _Member:
    """What stays of one device's membership from life to life."""

    options: NodeOptions
    state: NodeState
    metrics: NodeMetrics
    scrape: Scrape | None = None


def _open_member(options: NodeOptions, metrics: NodeMetrics, ends: ExitStack) -> _Member:
    """Locks and reads the state folder, until `ends`."""
    if options.link.role == "server":
        journal = Journal(options.state, partial(metrics.record, "barnraise_server_journal_sync_duration_seconds"))
    else:
        journal = Journal(options.state)
    ends.callback(journal.close)
    state = NodeState(options.state, options.link, journal)
    log = structlog.get_logger("node")
    log.info("state", folder=str(options.state.absolute()))
    scrape = open_metrics(metrics, options.state, options.metrics, NODE_PORTS, {"role": options.link.role})
    if scrape is not None:
        ends.callback(scrape.close)
        log.info("metrics", address=scrape.url)
    return _Member(options, state, metrics, scrape)


def _open_further(options: NodeOptions, ends: ExitStack) -> _Member | None:
    """Of a further device. Where the link has run out, one that is no member yet cannot become one: it is left out, and
    those that are go on."""
    try:
        return _open_member(options, NodeMetrics(options.link.role), ends)
    except BadInputError as error:
        if time.time() < options.link.statement.not_after:
            raise
        structlog.get_logger("node").warning("one device is left out", device=str(options.device), detail=str(error))
        return None


async def _run(options: NodeOptions) -> str:
    """One life of the process. The state folder is locked from the first to the last moment."""
    role = options.link.role
    metrics = NodeMetrics(role)
    set_up_logging(metrics, role=role, seldom=SELDOM, detail=DETAIL)
    with ExitStack() as ends:
        first, *further = options.by_device()
        members = [_open_member(first, metrics, ends)]
        members += [member for each in further if (member := _open_further(each, ends)) is not None]
        limits = options.limits.open(options.state)
        ends.callback(limits.close)
        state = members[0].state

        def make(owner: OwnerLimits | None = None, place: int = 0) -> _Node:
            return _Node(members[place], limits, owner, len(members))

        if role != "volunteer":
            ends.callback(note_process(options.state))
        if role == "server":
            state.crashes.check(options.state)
            with state.crashes.counted(state.is_of_checkpoints):
                ended = await live(lambda: make().run(), limits, metrics)
            state.crashes.ended(ended)
            return ended
        if role == "auditor":
            return await live(lambda: make().run(), limits, metrics)
        names = [str(member.options.device) for member in members]
        return await lend(
            lambda owner: Cards(partial(make, owner), names, lambda: state.membership is not None),
            state=options.state,
            link=options.link,
            nodes=[member.state.identity.node for member in members],
            run_name=lambda: next((one.state.config.name for one in members if one.state.config is not None), ""),
            overrides=dict(options.overrides),
            metrics=[member.metrics for member in members],
            line=limits,
            page=options.page_token if options.page else None,
            page_port=options.page_port,
            starting=options.starting,
        )


class _Node:
    """Everything of one life, put together."""

    def __init__(self, member: _Member, limits: Limits, owner: OwnerLimits | None = None, members: int = 1) -> None:
        """`members`: how many of this process share the computer's memory."""
        self._options = options = member.options
        self._owner = owner or OwnerLimits()
        self._scrape = member.scrape
        self._limits = limits
        self._state = member.state
        self._metrics = member.metrics
        self._role = options.link.role
        self._log = structlog.get_logger("node")
        self._keys = count(1)
        self._keeping = trio.Lock()
        self._pump: Pump
        self._driver: Driver
        self._machine: NodeMachine | None = None
        self._told_early: list[Told] = []
        self._share = 1.0
        self._free_bytes = psutil.virtual_memory().available // members
        self._store = TensorStore(self._keys, incoming_bytes(self._free_bytes))

    # ---- what the owner's keeper may do --------------------------------------------------------------------------

    def tell(self, fact: Told) -> None:
        """Asks the machine; what comes before there is one is kept for it."""
        if self._machine is None:
            self._told_early.append(fact)
        else:
            self._pump.put(fact)

    def end_device(self) -> None:
        """The device's memory is free when this returns, or as soon as the system gets round to it; what the device had
        to do is handed back by `yield`."""
        if self._machine is None or self._driver.device is None:
            return
        seconds = self._driver.device.kill()
        if seconds is None:
            self._log.warning("device is killed and not gone yet", detail="this computer is very busy, or its driver")
        else:
            self._log.info("device given back", seconds=round(seconds, 3))

    def _device_options(self) -> DeviceOptions:
        owner = self._owner
        return DeviceOptions(self._options.threads, self._options.device, owner.low_priority, owner.gpu_memory_bytes)

    def set_share(self, share: float) -> None:
        """The part of the time in which the device works."""
        self._share = share
        if self._machine is not None and self._driver.device is not None:
            self._driver.device.set_share(share)

    def facts(self) -> dict[str, Any]:
        """What screens show of this life."""
        machine = self._machine
        if machine is None:
            return {}
        volunteer = machine.volunteer
        return {
            "stage": machine.stage,
            "stages": 0 if machine.plan is None else len(machine.plan.stages),
            "waiting_for": machine.waiting_for(),
            "busy": volunteer is not None and volunteer.counters()["leases"] > 0,
            "totals": {} if volunteer is None else volunteer.given(),
            "paths": self._driver.paths(),
            "device": None if self._driver.device is None else self._driver.device.hello,
            "coordinator": machine.has_coordinator,
            "news": machine.news,
        }

    async def run(self) -> str:
        """Until the machine says `Exit`; returns the reason."""
        listeners, addresses = await self._state.listen(self._options.listen, self._options.announce)
        try:
            return await self._run(listeners, addresses)
        finally:
            self._metrics.offline()
            for listener in listeners:
                await listener.aclose()

    async def _run(self, listeners: list[trio.SocketListener], addresses: tuple[str, ...]) -> str:
        link, state = self._options.link, self._state
        mapped_port = forwardable_port(listeners) if self._options.ways.map_port else 0
        trust = self._trust = Trust(link.run_id, link.coordinator_key)
        state.recall_bans(trust)
        machine = self._make_machine(addresses)

        def admit(key: bytes, credential: bytes) -> str:
            return trust.admit(key, credential, time.time())

        driver = self._driver = Driver(
            self._store, self._metrics, self._role, on_welcome=self._on_welcome, measured=self._options.measured
        )
        if self._scrape is not None:
            driver.also_reported = self._scrape.counters()
        driver.pump = self._pump = Pump(machine, driver)
        driver.activity.waiting_for = machine.waiting_for
        self._machine = machine
        for fact in self._told_early:
            self._pump.put(fact)
        async with trio.open_nursery() as nursery:
            driver.nursery = nursery
            driver.transport = Transport(
                nursery,
                identity=state.identity,
                role=self._role,
                run_id=link.run_id,
                credential=state.credential,
                admit=admit,
                events=driver,
                limits=self._limits,
            )
            driver.transport.on_moved = driver.on_moved
            budget = driver.transport.budget = Budget(incoming_bytes(self._free_bytes), lambda: self._store.byte_count)
            self._metrics.ask("barnraise_transport_incoming_bytes", lambda: float(budget.held_bytes))
            self._metrics.record("barnraise_transport_incoming_limit_bytes", budget.total_bytes)
            driver.connector = assemble(
                nursery,
                transport=driver.transport,
                proof=Proof(state.identity, link.run_id, state.credential, admit),
                link=link,
                role=self._role,
                options=self._options.ways,
                surroundings=Surroundings(*self._split(addresses)),
                give_up=driver.no_way,
                record=self._metrics.record,
                rejected=driver.on_rejected,
                count_relayed=driver.on_relay,
                places=OwnPlaces(
                    look=lambda: self._split(state.addresses()),
                    announce=lambda everybody, local: self._pump.put(AddressesChanged(everybody, local)),
                    forwarded_port=mapped_port,
                ),
            )
            sealer = Sealer(state.identity, state.credential, link.coordinator_key)
            if self._role != "volunteer":
                from node.process import own_lanes  # loaded before the loop began
            if self._role == "server":
                allowed = self._options.allowed
                driver.journal = JournalWriter(state.journal, self._pump.put)
                nursery.start_soon(driver.journal.run)
                for name, lane in own_lanes.server_lanes(state.folder.absolute(), allowed, sealer).items():
                    driver.add_lane(name, lane)
            if listeners:
                nursery.start_soon(driver.transport.serve, listeners)
                nursery.start_soon(StunResponder().serve, listeners)
            if self._role == "volunteer":
                driver.add_device(self._device_options()).set_share(self._share)
            elif self._options.computes:
                evidence_of = (state.folder.absolute(), sealer) if self._role == "auditor" else None
                device = own_lanes.device_lane(self._options.threads, self._options.device, evidence_of)
                driver.add_lane("device", device)
            if self._role != "volunteer":
                await nursery.start(watch_signals, self._pump.put)
            if self._role == "server":
                nursery.start_soon(tell_samples, partial(checkpoints_to_read, machine), self._tell_coordinator)
            nursery.start_soon(watch_loop, self._metrics)
            nursery.start_soon(self._watch_machine, machine)
            nursery.start_soon(self._watch_disk, machine)
            nursery.start_soon(driver.measuring.run)
            self._metrics.ask_volunteer(machine)
            nursery.start_soon(self._watch_quota)
            if state.config is not None:
                self._know(state.config)
            reason = await self._pump.run()
            await driver.close_links(CLOSE_LINKS_S)
            await trio.to_thread.run_sync(driver.close_lanes)
            nursery.cancel_scope.cancel()
        return reason

    def _split(self, addresses: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(where anybody can dial us, where our own network can). What the owner announced is taken at its word."""
        return (addresses, ()) if self._options.announce else split(addresses)

    def _make_machine(self, addresses: tuple[str, ...]) -> NodeMachine:
        options, state = self._options, self._state
        everybody, local = self._split(addresses)
        records: list[Record] = []
        checkpoints: tuple[int, ...] = ()
        if self._role == "server":
            records = state.journal.read(self._store)
            checkpoints, incomplete = state.checkpoints(options.checkpoints, options.allowed)
            for sentence in incomplete:
                self._log.warning("checkpoint cannot be used", detail=sentence)
        facts = NodeFacts(
            role=self._role,
            addresses=everybody,
            local_addresses=local,
            build=BUILD,
            tokens_per_s=options.tokens_per_s,
            memory_bytes=self._free_bytes,
            name=self._owner.name,
            wished_stage=options.stage,
            checkpoints=checkpoints,
            computes=options.computes,
            incarnation=secrets.randbits(62),
            secret=secrets.token_bytes(KEY_BYTES),
            kept=state.kept,
            records=records,
            gives_up=state.crashes.gives_up,
        )
        return NodeMachine(
            state.identity.node, facts, options.link.coordinator, options.link.addresses, self._keys, self._trust
        )

    # ---- what comes meanwhile ------------------------------------------------------------------------------------

    async def _on_welcome(self, welcome: Welcome | PlanChanged) -> None:
        """Keeps membership and run. A server that did not know the run looks for its checkpoints at once: the link is
        not read meanwhile, so a coordinator that asks before it sends the run back hears what was found.

        A disk that hangs holds up what the coordinator says, and no other link: all writing is done in a thread.
        """
        async with self._keeping:
            await self._keep(welcome)

    async def _keep(self, welcome: Welcome | PlanChanged) -> None:
        if isinstance(welcome, PlanChanged):
            await trio.to_thread.run_sync(self._state.keep_plan, welcome)
            if self._state.config is not None:
                self._know(self._state.config)
            return
        first = self._state.config is None
        if (offset_s := self._state.clock_offset_s(welcome)) is not None:
            self._metrics.record("barnraise_clock_offset_seconds", offset_s)
        await trio.to_thread.run_sync(self._state.keep, welcome)
        await trio.to_thread.run_sync(self._state.keep_plan, welcome)
        self._know(welcome.config)
        if first and self._role == "server":
            found, incomplete = await trio.to_thread.run_sync(
                self._state.checkpoints, self._options.checkpoints, self._options.allowed
            )
            for sentence in incomplete:
                self._log.warning("checkpoint cannot be used", detail=sentence)
            if found:
                self._pump.put(CheckpointsFound(found))

    def _know(self, config: RunConfig) -> None:
        """The run is known: the series of its name, and the largest tensor that can honestly occur."""
        self._metrics.set_run(config.name)
        kept = self._state.kept
        sizes = (kept.vocabulary, kept.plan) if kept is not None else (0, None)
        self._driver.transport.options = link_options(config, *sizes)
        self._driver.step_tasks = config.batch.microbatches
        self._driver.checkpoints_are_brought = config.checkpoint.is_url

    async def _watch_quota(self) -> None:
        """Little is left: finish and leave. Nothing is left: leave, with links that carry no more bytes."""
        await self._limits.low.wait()
        self._log.warning("transfer quota", detail="almost used up: finishing what is under way")
        self._pump.put(Told("suspend quota"))
        await self._limits.used_up.wait()
        self._pump.put(Told("stop quota"))

    def _tell_coordinator(self, message: Message) -> bool:
        link = self._driver.transport.link_to(self._options.link.coordinator)
        if link is not None:
            link.send(message)
        return link is not None

    async def _watch_machine(self, machine: NodeMachine) -> None:
        """Every second: the gauges that only the machine knows, and the phases."""
        while True:
            self._driver.count_links()
            self._metrics.show(machine, self._state.journal.byte_count)
            self._metrics.show_limits(self._limits)
            self._driver.look_at_memberships()
            await trio.sleep(1.0)

    async def _watch_disk(self, machine: NodeMachine) -> None:
        """Every second: what is free, and what the next life shall know, beside what the coordinator says. A disk that
        hangs holds up this and the coordinator's words, and no link."""
        while True:
            await trio.to_thread.run_sync(self._metrics.show_disk, self._state.folder)
            if self._state.has_news_of_bans(self._trust):
                async with self._keeping:
                    await trio.to_thread.run_sync(self._state.keep_bans, self._trust)
            if machine.server is not None and machine.server.has_closed_some and self._state.crashes.are_known:
                await trio.to_thread.run_sync(self._state.crashes.forget)
            await trio.sleep(1.0)

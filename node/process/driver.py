"""Performs the effects of one node's machine: links, lanes, journal, store, counters. The handlers of the pump.

What comes from outside passes here once: tensors get keys and, from volunteers, a look at their form; a `Welcome`
leaves its membership on the disk; a report takes along what only the driver can count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog
import trio

from node.compute.lane import Lane, Outcome, input_refs
from node.links.connector import Connector
from node.machine.jobs import (
    DEVICE_JOBS,
    STORE_JOBS,
    SUM_JOBS,
    Apply,
    Backward,
    BringManifest,
    BringPart,
    Reduce,
    SetUpServer,
    WriteCheckpoint,
    WriteManifest,
)
from node.measure.activity import Activity
from node.measure.measuring import Measuring
from node.measure.meter import Figures
from node.process.device_frames import Done
from node.process.device_lane import DeviceLane
from node.process.device_start import DeviceOptions
from node.process.journal import JournalWriter, tensors_of
from node.process.metrics import NodeMetrics
from node.process.screening import Screening
from node.process.store import Buffer, StoreError, StoreFullError, TensorStore
from protocol.base.errors import RemoteProtocolError
from protocol.base.ids import NodeId, TensorRef
from protocol.base.limits import REPORT_COUNTERS
from protocol.base.machine import (
    Compute,
    Computed,
    ComputeFailed,
    Count,
    DeviceLost,
    Dial,
    DropTensors,
    HangUp,
    LinkDown,
    LinkMoved,
    LinkUp,
    Log,
    Persist,
    Prune,
    Received,
    Send,
    ShareTensor,
    StartPlanning,
    WorkGoesOn,
)
from protocol.drive.process import write_log
from protocol.drive.pump import Pump
from protocol.drive.transport import PATHS, Link, Transport
from protocol.messages import (
    FetchSpans,
    LinkReport,
    Message,
    NodeReport,
    PlanChanged,
    Renewed,
    Welcome,
)

OPERATIONS = {
    "Forward": "forward",
    "Backward": "backward",
    "RouteEnd": "backward",
    "WeightGradient": "backward_weights",
    "Evaluate": "validation",
    "TakeGradient": "weight_gradient",
    "Fold": "optimizer",
    "Reduce": "optimizer",
    "Apply": "optimizer",
}
"""Jobs that are pipeline operations, by the name that the metrics give them."""
AGAIN_S = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Waits before each try to start the device's process again, a minute in all: the system may have killed it for want of
memory, and have none for another one yet."""
VISIT_S = 60.0
"""How long a volunteer may hold a link without a word about work: it looks at the run, and measures (see `on_up`)."""


class Driver:
    """The hands of one node's machine. All methods run on trio's thread unless they say otherwise.

    Args:
        role: server, volunteer or auditor
        on_welcome: keeps what a `Welcome` or a `PlanChanged` brings, before the machine sees it.
        measured: (peer, path, figures) of links that were measured before this process began.
    """

    def __init__(
        self,
        store: TensorStore,
        metrics: NodeMetrics,
        role: str,
        on_welcome: Callable[[Welcome | PlanChanged], Awaitable[None]],
        measured: Sequence[tuple[NodeId, str, Figures]] = (),
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._on_welcome = on_welcome
        self._links: dict[NodeId, Link] = {}
        self._visitors: dict[NodeId, Link] = {}
        """Volunteers that have not said a word about work: no matter of the machine yet."""
        self.measuring = Measuring(
            self,
            # Volunteers and auditors measure their links to servers; of two servers the one that dialled does.
            chooses=lambda link: link.role == "server" and (role != "server" or link.dialled),
            report=self._report_links,
            known=measured,
        )
        self._lanes: dict[str, Lane | DeviceLane] = {}
        self.activity = Activity()
        self._screening = Screening()
        self.device: DeviceLane | None = None
        """A volunteer's; a server that computes does it in a thread."""
        self._totals: dict[str, float] = {}
        self._device_since: float | None = None
        self._device_busy_s = 0.0
        self._reduce_s = 0.0
        self._log = structlog.get_logger("node")
        self._token = trio.lowlevel.current_trio_token()
        self.pump: Pump
        self.transport: Transport
        self.connector: Connector
        self.nursery: trio.Nursery
        self.journal: JournalWriter | None = None
        """Set for a server."""
        self.also_reported: dict[str, float] = {}
        """What every report says beside the counts: where `/metrics` answers."""
        self.checkpoints_are_brought = False
        """Whether the run's checkpoints lie in an object store."""
        self.step_tasks = 1
        """Microbatches of a step, as soon as the run is known: they share out what a sum of gradients can hold."""

    # ---- lanes -------------------------------------------------------------------------------------------------------

    def add_lane(self, name: str, open_lane: Callable[[Callable[[Outcome], None]], Lane]) -> None:
        """Starts a lane; its outcomes come back to the machine."""
        lane = self._lanes[name] = open_lane(self._deliver)
        self._metrics.ask("barnraise_node_queue_items", lambda: float(lane.waiting), queue=name)

    def add_device(self, options: DeviceOptions) -> DeviceLane:
        """Starts the process that has a volunteer's device; its outcomes come back to the machine. Raises
        `StoreFullError` where the system has no room for another process."""
        try:
            lane = DeviceLane(options, self._deliver_from_device, self._device_lost)
        except OSError as error:
            raise StoreFullError(f"the device's process cannot be started: {error.strerror or error}") from error
        self.device = self._lanes["device"] = lane
        self._metrics.ask("barnraise_node_queue_items", lambda: float(lane.waiting), queue="device")
        return lane

    def _deliver_from_device(self, job: Any, done: Done | str, buffers: list[Buffer]) -> None:
        """In the lane's thread."""
        if isinstance(done, str):
            self._deliver(Outcome(ComputeFailed(job, done)))
            return
        fact = Computed(job, done.result) if done.reason is None else ComputeFailed(job, done.reason)
        tensors = list(zip(done.refs, buffers, strict=True))
        self._deliver(Outcome(fact, tensors, done.kind, done.seconds, done.codec_s))

    def _device_lost(self, reason: str) -> None:
        """In the lane's thread: the process has ended by itself."""

        def go_on() -> None:
            self.nursery.start_soon(self._start_device_again, reason)

        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(go_on)

    async def _start_device_again(self, reason: str) -> None:
        """Right after the system has killed a process for want of memory it may not start another one."""
        assert self.device is not None
        refusal = ""
        for wait_s in AGAIN_S:
            await trio.sleep(wait_s)
            try:
                if self.device.start_again():
                    self.activity.device_lost()
                    self.pump.put(DeviceLost(reason))
                return
            except OSError as error:
                refusal = error.strerror or str(error)
                self._log.warning("the device's process cannot be started", reason=refusal)
        raise StoreFullError(f"the device's process ended ({reason}), and no other can be started: {refusal}")

    def close_lanes(self) -> None:
        """Waits until the lanes have ended the job they are at; the rest is forgotten. Blocks: in a thread."""
        for lane in self._lanes.values():
            lane.close()

    def compute(self, effect: Compute) -> None:
        job = effect.job
        buffers = {ref.key: self._store.get(ref.key) for ref in input_refs(job)}
        on_device = self._on_device(job)
        self.activity.job_begins(on_device, trio.current_time())
        own = "store" if isinstance(job, STORE_JOBS) else "sums" if isinstance(job, SUM_JOBS) else "server"
        lane = "device" if on_device else own
        self._lanes[lane].submit(job, buffers)

    def _on_device(self, job: Any) -> bool:
        return type(job) in DEVICE_JOBS or "server" not in self._lanes  # an auditor has no other lane

    def _deliver(self, outcome: Outcome) -> None:
        """In the lane's thread."""
        with contextlib.suppress(trio.RunFinishedError):  # the process ends; nobody wants the result
            self._token.run_sync_soon(self._done, outcome)

    def _done(self, outcome: Outcome) -> None:
        try:
            for ref, buffer in outcome.tensors:
                self._store.put(ref.key, buffer, ref.shape, ref.form)
        except (StoreError, StoreFullError) as error:
            self.nursery.start_soon(_fail, error)  # an error here would be trio's own, without our name for it
            return
        if not isinstance(outcome.fact, WorkGoesOn):
            self._account(outcome)
        self.pump.put(outcome.fact)

    def _account(self, outcome: Outcome) -> None:
        record = self._metrics.record
        job = outcome.fact.job
        self.activity.job_ended(job, self._on_device(job), outcome.seconds, trio.current_time())
        if type(job) in DEVICE_JOBS:
            self._device_since = self._device_since or time.monotonic() - outcome.seconds
            self._device_busy_s += outcome.seconds
        if outcome.kind in ("compute", "optimizer"):
            self._metrics.spend(outcome.kind, outcome.seconds - outcome.codec_s)
            self._total(f"{outcome.kind}_s", outcome.seconds - outcome.codec_s)
        self._metrics.spend("codec", outcome.codec_s)
        self._total("codec_s", outcome.codec_s)
        operation = OPERATIONS.get(type(job).__name__)
        if operation in ("forward", "backward"):
            self._total(f"tasks_{operation}", 1.0)
        if isinstance(job, Backward) and job.input is not None:
            self._total("tasks_recomputed", 1.0)
        if operation is not None:
            record("barnraise_node_operation_duration_seconds", outcome.seconds, operation=operation)
            record("barnraise_node_microbatches_total", operation=operation)
            record("barnraise_node_last_work_timestamp_seconds", time.time())
        if isinstance(job, SetUpServer) and isinstance(outcome.fact, Computed):
            record("barnraise_server_parameters", outcome.fact.result)
            record("barnraise_server_parameter_bytes", 4 * outcome.fact.result)
            record("barnraise_server_optimizer_state_bytes", 8 * outcome.fact.result)
        elif isinstance(job, Reduce):
            record("barnraise_server_step_contributions", job.contribution_count)
            self._reduce_s = outcome.seconds
        elif isinstance(job, Apply):
            record("barnraise_server_step_duration_seconds", self._reduce_s + outcome.seconds)
        elif isinstance(job, WriteCheckpoint | WriteManifest | BringPart | BringManifest):
            self._account_checkpoint(job, outcome)

    def _account_checkpoint(
        self, job: WriteCheckpoint | WriteManifest | BringPart | BringManifest, outcome: Outcome
    ) -> None:
        """Where checkpoints lie in an object store, one is written when it was brought there."""
        record = self._metrics.record
        record("barnraise_server_checkpoint_duration_seconds", outcome.seconds)
        if isinstance(outcome.fact, ComputeFailed):
            record("barnraise_server_checkpoints_total", outcome="failed")
        elif isinstance(job, BringPart | BringManifest) or not self.checkpoints_are_brought:
            record("barnraise_server_checkpoints_total", outcome="written")
            record("barnraise_server_checkpoint_last_success_timestamp_seconds", time.time())
        if isinstance(outcome.fact, Computed) and isinstance(job, WriteCheckpoint):
            record("barnraise_server_checkpoint_bytes", outcome.fact.result[1])

    def _total(self, counter: str, value: float) -> None:
        self._totals[counter] = self._totals.get(counter, 0.0) + value

    # ---- links -------------------------------------------------------------------------------------------------------

    def dial(self, effect: Dial) -> None:
        self.connector.dial(effect.peer, effect.addresses)

    def no_way(self, peer: NodeId, reason: str) -> None:
        """For the connector: an attempt has come to nothing."""
        if peer not in self._links:
            self.pump.put(LinkDown(peer, reason))

    def hang_up(self, effect: HangUp) -> None:
        link = self._links.get(effect.peer)
        if link is not None:
            if link.has_much_under_way and trio.current_time() < link.heard_at + effect.silent_s:
                return
            self._log.info("hang up", peer=effect.peer, reason=effect.reason)
            link.close(effect.reason)
            if effect.fault:
                link.at_fault()

    def send(self, effect: Send) -> None:
        link = self._links.get(effect.peer)
        if link is None:
            return
        message = effect.message
        self.activity.says(effect.peer, message, trio.current_time())
        if isinstance(message, NodeReport):
            message = self._complete(message)
        refs: tuple[TensorRef, ...] = getattr(message, "tensors", ())
        if refs:
            self._count_forms(refs)
            numbered = tuple(TensorRef(i, ref.shape, ref.form, ref.byte_count) for i, ref in enumerate(refs))
            message = msgspec.structs.replace(message, tensors=numbered)
        link.send(message, [self._store.get(ref.key) for ref in refs])

    def _count_forms(self, refs: tuple[TensorRef, ...]) -> None:
        """Sent tensors, against the same values in fp32."""
        for ref in refs:
            self._metrics.record("barnraise_codec_input_bytes_total", 4 * math.prod(ref.shape), codec=ref.form)
            self._metrics.record("barnraise_codec_output_bytes_total", ref.byte_count, codec=ref.form)

    def _complete(self, report: NodeReport) -> NodeReport:
        """Adds what the driver counts, and leaves out what the protocol has no name for."""
        counters = {**self._totals, **self.also_reported, **report.counters}
        if self._device_since is not None:
            counters["input_wait_s"] = time.monotonic() - self._device_since - self._device_busy_s
        return msgspec.structs.replace(
            report, counters={name: counters[name] for name in REPORT_COUNTERS if name in counters}
        )

    def on_up(self, link: Link) -> None:
        """The machine hears of it at once, but of a volunteer's link with the first word that is about work.

        A volunteer speaks first in any case. One that only looks at the run and measures its line would otherwise
        count as somebody who computes, and servers that compute only while nobody else does would wait for it.
        """
        self._links[link.peer] = link
        link.watch = partial(self._moved, link.peer)
        self.count_links()
        self.connector.on_up(link)
        self.measuring.up(link)
        if link.role == "volunteer":
            self._visitors[link.peer] = link
            self.nursery.start_soon(self._end_visit, link)
        else:
            self._tell_up(link)

    def on_moved(self, link: Link) -> None:
        """For the transport: the link goes another way now."""
        self.pump.put(LinkMoved(link.peer, link.was_silent_s))
        self.connector.on_moved(link)

    def _moved(self, peer: NodeId, direction: str, message: Message, byte_count: int, began_s: float) -> None:
        self.activity.moved(peer, direction, message, byte_count, began_s, trio.current_time())

    def _tell_up(self, link: Link) -> None:
        self.pump.put(LinkUp(link.peer, link.role, link.public_key, link.credential, link.address))

    async def _end_visit(self, link: Link) -> None:
        await trio.sleep(VISIT_S)
        if self._visitors.get(link.peer) is link:
            link.close("silent: not a word about work")

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        await self.pump.room()
        if self._links.get(link.peer) is not link:
            return  # the link went down while this waited
        if self.measuring.take(link, message):
            return
        if isinstance(message, FetchSpans):
            link.send(self.activity.ring.answer(message, trio.current_time()))
            return
        self.activity.heard(message, trio.current_time())
        if isinstance(message, Renewed):
            self._renew(link, message.membership)
            return
        if self._visitors.get(link.peer) is link:
            del self._visitors[link.peer]
            self._tell_up(link)
        seen = await self._screening.look(link.role, message, buffers, self.step_tasks)
        if self._links.get(link.peer) is not link:
            return  # the link went down meanwhile
        if seen.refusal is not None:
            self._refuse(link, *seen.refusal)
            return
        if seen.square_norm is not None:
            message = msgspec.structs.replace(message, square_norm=seen.square_norm)
        if buffers:
            refs: tuple[TensorRef, ...] = message.tensors  # type: ignore[attr-defined]
            stored = tuple(
                self._store.add(buffer, ref.shape, ref.form) for ref, buffer in zip(refs, buffers, strict=True)
            )
            message = msgspec.structs.replace(message, tensors=stored)
        if link.role == "coordinator":
            self._metrics.record("barnraise_node_last_heartbeat_timestamp_seconds", time.time())
            if isinstance(message, Welcome | PlanChanged):
                await self._on_welcome(message)
                if self._links.get(link.peer) is not link:
                    return  # it has ended meanwhile, and perhaps another one is here: what it said is said again
            if self.connector.on_message(message):
                return
        self.pump.put(Received(link.peer, message, seen.size))

    def _renew(self, link: Link, membership: bytes) -> None:
        """The peer shows a newer membership of its own, with the role that it had."""
        try:
            if self.transport.admit(link.public_key, membership) != link.role:
                raise RemoteProtocolError("role", "a membership for another role")
        except RemoteProtocolError as error:
            self._refuse(link, error.reason, error.detail)
            return
        link.credential = membership

    def look_at_memberships(self) -> None:
        """Now and then: ends the links of peers that would not be let in any more."""
        for link in list(self._links.values()):
            if link.closing:
                continue
            try:
                self.transport.admit(link.public_key, link.credential)
            except RemoteProtocolError as error:
                self._refuse(link, error.reason, error.detail)

    def on_down(self, link: Link, reason: str) -> None:
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            self.count_links()
            self.connector.on_down(link, reason)
            self.measuring.down(link)
            if self._visitors.pop(link.peer, None) is None:
                self.pump.put(LinkDown(link.peer, reason))

    def paths(self) -> dict[str, int]:
        """How many links go by each way."""
        return dict(Counter(link.path for link in self._links.values()))

    def count_links(self) -> None:
        """Sets the gauges of links by path; called now and then too, since a link may move without being told."""
        paths = [link.path for link in self._links.values()]
        for path in PATHS:
            self._metrics.record("barnraise_transport_connections", paths.count(path), path=path)

    def _report_links(self, report: LinkReport) -> None:
        for link in self._links.values():
            if link.role == "coordinator":
                link.send(report)

    def round_trip(self, path: str, seconds: float) -> None:
        self._metrics.record("barnraise_transport_round_trip_seconds", seconds, path=path)

    def refuse(self, link: Link, detail: str) -> None:
        self._refuse(link, "unexpected", detail)

    def on_relay(self, metric: str, value: float, labels: dict[str, str]) -> None:
        """For the relay of a server: what it counts."""
        self._metrics.record(metric, value, **labels)
        if metric == "barnraise_server_relay_bytes_total":
            self._total("relay_bytes", value)
        elif metric == "barnraise_server_relay_sessions":
            self._totals["relay_sessions"] = value

    def on_rejected(self, address: str, reason: str, detail: str, count: int = 1) -> None:
        more = {"count": count} if count > 1 else {}
        self._log.warning("peer refused", address=address, reason=reason, detail=detail, **more)
        self._metrics.record("barnraise_transport_rejected_messages_total", count, reason=reason)
        self._total("rejected_messages", count)

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        self._metrics.record("barnraise_transport_bytes_total", byte_count, direction=direction, kind=kind)
        self._metrics.record("barnraise_transport_messages_total", message_count, direction=direction, kind=kind)
        self._total(f"bytes_{direction}_{kind}", byte_count)

    def _refuse(self, link: Link, reason: str, detail: str) -> None:
        self.on_rejected(link.address, reason, f"{link.peer}: {detail}")
        link.close(reason)
        link.at_fault(reason)

    async def close_links(self, seconds: float) -> None:
        """Ends every link cleanly: what was queued without tensors still goes out."""
        for link in list(self._links.values()):
            link.close("the process ends")
        with trio.move_on_after(seconds):
            while self._links:
                await trio.sleep(0.01)

    # ---- disk, store, words ------------------------------------------------------------------------------------------

    def persist(self, effect: Persist) -> None:
        assert self.journal is not None, "only servers write records"
        buffers: Sequence[Buffer] = [self._store.get(ref.key) for ref in tensors_of(effect.record)]
        self.journal.append(effect.record_number, effect.record, tuple(buffers))

    def prune(self, effect: Prune) -> None:
        assert self.journal is not None, "only servers write records"
        self.journal.forget(effect.step)

    def drop_tensors(self, effect: DropTensors) -> None:
        self._store.drop(effect.keys)

    def share_tensor(self, effect: ShareTensor) -> None:
        self._store.share(effect.key, effect.copy)

    def log(self, effect: Log) -> None:
        write_log(self._log, effect)

    def start_planning(self, effect: StartPlanning) -> None:
        raise AssertionError("a node plans nothing")

    def count(self, effect: Count) -> None:
        self._metrics.apply(effect)


async def _fail(error: Exception) -> None:
    """Ends the process with an error from where no caller could catch it."""
    raise error

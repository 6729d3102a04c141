"""A device in a process of its own: the same results as in a thread, and gone within a moment when it is asked for."""

from __future__ import annotations

import io
import os
import queue
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch

from node.compute.device_performer import DevicePerformer
from node.compute.device_process import REST_MAX_S
from node.compute.devices.choice import DeviceChoice
from node.compute.forms import p12
from node.compute.lane import Outcome
from node.compute.worker import StageWorker
from node.machine.jobs import Forward, LoadParameters, SetUpDevice, TakeGradient
from node.platform.pipes import PIPE_BYTES
from node.process.device_frames import JOB_TYPES, RESULTS, read_outcome, write_outcome
from node.process.device_lane import DeviceLane
from node.process.device_start import DeviceOptions, DeviceStart
from node.process.store import Buffer
from node.volunteer.room import is_out_of_memory
from protocol.base.ids import NodeId, TaskId, TensorRef
from protocol.base.machine import Computed, ComputeFailed
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from tests.node.compute.small import VOCABULARY, small_run

CONFIG = small_run()
SERVERS = tuple(ServerPlan(node=NodeId(role), role=role, addresses=()) for role in ("front", "back"))
STAGE = StagePlan(servers=SERVERS)
COURSE = Course((Chunk(0, 4, 0), Chunk(4, CONFIG.block_count, 1)), ((0, 1),))
PLAN = Plan(generation=1, ledger_generation=1, restore_step=-1, stages=(STAGE, STAGE), course=COURSE)
SET_UP = SetUpDevice(CONFIG, VOCABULARY, PLAN, 0)
PATIENCE_S = 60.0
REF = TensorRef(4, (2, 6, 16), "fp32", 768)


class Listener:
    """What the lane delivers and tells."""

    def __init__(self) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.lost: queue.Queue[str] = queue.Queue()

    def deliver(self, job: Any, done: Any, buffers: list[Buffer]) -> None:
        self.answers.put((job, done, buffers))

    def answer(self) -> Any:
        return self.answers.get(timeout=PATIENCE_S)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def lane(listener: Listener) -> Iterator[DeviceLane]:
    lane = DeviceLane(DeviceOptions(1, DeviceChoice("cpu")), listener.deliver, listener.lost.put)
    yield lane
    lane.close()


def forward() -> tuple[list[tuple[Any, dict[int, Buffer]]], TensorRef]:
    """Jobs up to one forward, with their bytes."""
    performer = DevicePerformer()
    performer.perform(SET_UP, {})
    layout = performer._stage.layout
    values = torch.randn(layout.parameter_count, generator=torch.Generator().manual_seed(1)) * 0.02
    bits = p12.fixed_bits(SET_UP.config)
    loads: dict[int, Buffer] = {}
    parts = []
    for shard in range(2):
        begin, end = layout.shard_range(shard, 2)
        loads[shard + 1] = p12.encode(values[begin:end], None, 0, bits)
        parts.append(TensorRef(shard + 1, (end - begin,), "p12", len(loads[shard + 1])))
    tokens = np.random.default_rng(2).integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    x = TensorRef(3, (2, 16), "int32", tokens.nbytes)
    task = TaskId(0, 0, 0, "F")
    jobs: list[tuple[Any, dict[int, Buffer]]] = [
        (SET_UP, {}),
        (LoadParameters(0, tuple(parts), (), (1, 1)), loads),
        (Forward(task, 0, x, 4), {3: tokens.tobytes()}),
    ]
    return jobs, x


@pytest.mark.slow
def test_a_process_that_was_loaded_ahead_is_the_lanes_own(listener: Listener) -> None:
    """Where it was started with the same words, and lives; else a new one is, and nothing is left of the first."""
    options = DeviceOptions(1, DeviceChoice("cpu"))
    for after, same in (("nothing", True), ("other words", False), ("its end", False), ("a change of mind", False)):
        DeviceStart.load_ahead(DeviceOptions(2, DeviceChoice("cpu")) if after == "other words" else options)
        ((_, ahead),) = DeviceStart.ahead
        if after == "its end":
            ahead.kill()
            ahead.wait()
        if after == "a change of mind":
            DeviceStart.forget_ahead()
        lane = DeviceLane(options, listener.deliver, listener.lost.put)
        try:
            assert (lane.pid == ahead.pid) == same and not DeviceStart.ahead
            assert same or ahead.returncode is not None
            if same:
                lane.submit(SET_UP, {})
                assert listener.answer()[1].reason is None
        finally:
            lane.kill()


@pytest.mark.slow
def test_a_process_gives_the_bytes_that_a_thread_gives(lane: DeviceLane, listener: Listener) -> None:
    """Set up, load, forward, cut a sum: results and tensors are those of the performer in this process."""
    jobs, _ = forward()
    jobs.append((TakeGradient(9, (10, 11)), {}))
    performer = DevicePerformer()
    for job, buffers in jobs:
        lane.submit(job, buffers)
        here = performer.perform(job, buffers)
        answered, done, there = listener.answer()
        assert answered is job and done.reason is None
        result = here.fact.result  # type: ignore[union-attr]
        if job is SET_UP:  # how many graphs fit follows from what memory is free at that moment
            assert isinstance(done.result, int) and isinstance(result, int) and min(done.result, result) > 0
        else:
            assert done.result == result
        assert done.refs == tuple(ref for ref, _ in here.tensors)
        assert [bytes(buffer) for buffer in there] == [bytes(buffer) for _, buffer in here.tensors]
    assert lane.hello is not None and lane.hello.label and lane.waiting == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a pipe's size")
def test_a_pipe_holds_a_whole_write(lane: DeviceLane) -> None:
    """Who reads a job beside a busy thread gets a turn for each piece: there are few."""
    import fcntl

    spare = os.pipe()
    try:
        fcntl.fcntl(spare[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except PermissionError:
        pytest.skip("NOT TRIED: this user's pipes hold as much as they may already")
    finally:
        for end in spare:
            os.close(end)
    for pipe in (lane._process.stdin, lane._process.stdout):
        assert pipe is not None and fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ) >= PIPE_BYTES


@pytest.mark.slow
def test_an_error_of_the_job_is_an_answer(lane: DeviceLane, listener: Listener) -> None:
    """As in a thread: the job fails with its reason, and the process lives."""
    jobs, _ = forward()
    lane.submit(*jobs[2])
    assert listener.answer()[1].reason == "no stage was set up"
    lane.submit(*jobs[0])
    assert listener.answer()[1].reason is None


@pytest.mark.slow
def test_a_device_that_its_driver_gave_up_gets_another_process(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed launch every call of that process fails: it answers, and ends; a fresh one works. (It lived on,
    and failed each job for ever.)"""
    monkeypatch.setattr(DeviceStart, "module", "tests.node.process.failing_device")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # tests are no installed package
    jobs, _ = forward()
    lane = DeviceLane(DeviceOptions(1, DeviceChoice.parse("small:64")), listener.deliver, listener.lost.put)
    try:
        for job in jobs[:2]:
            lane.submit(*job)
            assert listener.answer()[1].reason is None
        lane.submit(*jobs[2])
        assert listener.answer()[1].reason == "CUDA error: unspecified launch failure"
        assert listener.lost.get(timeout=PATIENCE_S).startswith("the device's driver failed")
        lane.start_again()
        lane.submit(*jobs[0])
        assert listener.answer()[1].reason is None
    finally:
        lane.kill()


def test_want_of_memory_reads_the_same_whoever_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A volunteer drops its graphs by the words "out of memory", which a library beside torch does not say."""

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    jobs, _ = forward()
    performer = DevicePerformer(1, DeviceChoice.parse("small:64"))
    for job in jobs[:2]:
        performer.perform(*job)
    monkeypatch.setattr(StageWorker, "forward", fails)
    fact = performer.perform(*jobs[2]).fact
    assert isinstance(fact, ComputeFailed) and is_out_of_memory(fact.reason) and "CUBLAS" in fact.reason
    assert not performer.is_lost


@pytest.mark.slow
def test_killing_it_is_over_at_once_and_quiet(lane: DeviceLane, listener: Listener) -> None:
    """The process is gone when `kill` returns, and nobody is told of a loss."""
    jobs, _ = forward()
    lane.submit(*jobs[0])
    listener.answer()
    pid = lane.pid
    for _ in range(50):
        lane.submit(*jobs[1])
    lane.kill()
    assert not psutil.pid_exists(pid)
    assert listener.lost.empty()


def test_a_device_that_is_slow_to_die_ends_nobody_else(
    lane: DeviceLane, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a computer with far more to do than it can, a killed process has not had its last turn yet: that is said, and
    the daemon goes on. (It ended with a traceback, at load 40, when a game started.)"""
    monkeypatch.setattr("node.process.device_lane.DIE_S", 0.0)
    device = psutil.Process(lane.pid)
    assert lane.kill() is None
    device.wait(PATIENCE_S)
    assert listener.lost.empty()


@pytest.mark.slow
def test_a_process_that_dies_fails_its_jobs_and_can_be_started_again(lane: DeviceLane, listener: Listener) -> None:
    """The system kills it for lack of memory: every unanswered job fails in order, then the loss is told; a fresh one
    knows nothing and works."""
    jobs, _ = forward()
    lane.submit(*jobs[0])
    listener.answer()
    psutil.Process(lane.pid).suspend()
    lane.submit(*jobs[1])
    lane.submit(*jobs[2])
    psutil.Process(lane.pid).kill()
    assert [listener.answer()[:2] for _ in range(2)] == [
        (job, "the device's process was killed (out of memory?)") for job, _ in jobs[1:]
    ]
    assert listener.lost.get(timeout=PATIENCE_S) == "the device's process was killed (out of memory?)"
    assert lane.start_again()
    lane.submit(*jobs[0])
    assert listener.answer()[1].reason is None


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_process_that_dies_before_it_is_ended_gets_none_after_it(
    lane: DeviceLane, listener: Listener, end: str
) -> None:
    """A pause comes before the driver has heard of the loss: no other process may have the device then. (One did,
    through the pause and after it: whoever closes a lane that was killed ends nothing.)"""
    lane.submit(SET_UP, {})
    listener.answer()
    psutil.Process(lane.pid).kill()
    listener.lost.get(timeout=PATIENCE_S)
    before = psutil.Process().children()
    lane.kill() if end == "kill" else lane.close()
    assert not lane.start_again()
    lane.close()
    assert set(psutil.Process().children()) <= set(before) and not psutil.pid_exists(lane.pid)


@pytest.mark.parametrize(
    ("job", "result"),
    [
        ("Forward", None), ("Forward", REF), ("Backward", None), ("RouteEnd", (1.5, REF)), ("SegmentEnd", (1.5, REF)),
        ("SegmentEnd", (1.5, None)), ("WeightGradient", None), ("Evaluate", 1.5),
    ],
)  # fmt: skip
def test_every_result_comes_back_as_it_was(job: str, result: Any) -> None:
    """Also those of samples in segments: a segment at a route's end has no output. Once its answer could not be read,
    and no volunteer ever ended a route in segments."""
    stream = io.BytesIO()
    oldest: Any = object.__new__(JOB_TYPES[job])
    write_outcome(stream, Outcome(Computed(oldest, result)))
    stream.seek(0)
    read = read_outcome(stream, lambda: oldest)
    assert read is not None and read[0].result == result


@pytest.mark.slow
def test_a_process_whose_words_cannot_be_read_is_ended(
    lane: DeviceLane, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, so nobody would hear of its end: its jobs fail at once, and another one can be started."""
    monkeypatch.setitem(cast(dict[str, Any], RESULTS), "SetUpDevice", str)
    jobs, _ = forward()
    lane.submit(*jobs[0])
    assert "its words cannot be read" in listener.answer()[1]
    assert "its words cannot be read" in listener.lost.get(timeout=PATIENCE_S)
    monkeypatch.undo()
    lane.start_again()
    lane.submit(*jobs[0])
    assert listener.answer()[1].reason is None


@pytest.mark.slow
def test_a_daemon_without_memory_for_a_frame_says_so(
    lane: DeviceLane, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader ended without a word: the node held its leases, and did nothing, for ever."""

    def no_memory(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("node.process.device_lane.read_outcome", no_memory)
    lane.submit(*forward()[0][0])
    assert "MemoryError" in listener.lost.get(timeout=PATIENCE_S)


@pytest.mark.slow
def test_it_works_no_more_than_its_share_of_the_time(lane: DeviceLane, listener: Listener) -> None:
    """After each job it rests, so that 2 % are 2 %, by the device's own count of its work."""
    jobs, _ = forward()
    for job in jobs:
        lane.submit(*job)
        listener.answer()
    lane.set_share(0.02)
    worked_s = []
    for number in range(4):
        if number == 1:
            began_s = time.monotonic()  # the first says that the new share holds
        lane.submit(*jobs[2])
        worked_s.append(listener.answer()[1].seconds)
    assert time.monotonic() - began_s >= sum(min(REST_MAX_S, 49 * seconds) for seconds in worked_s[:3])


@pytest.mark.slow
def test_the_owners_cap_bounds_what_the_device_holds(listener: Listener) -> None:
    """`gpu-memory`, on a small device: fewer graphs fit below a cap; where the stage does not, it says so."""
    graphs = []
    for cap_bytes in (None, 4e6, 1e4):
        lane = DeviceLane(DeviceOptions(1, DeviceChoice.parse("small:64"), True, cap_bytes), listener.deliver, print)
        lane.submit(SET_UP, {})
        done = listener.answer()[1]
        graphs.append(done.result if done.reason is None else done.reason)
        lane.close()
    free, capped, little = graphs
    assert 0 < capped < free and "memory" in little, graphs


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="a terminal's Ctrl-C goes to process groups")
def test_ctrl_c_in_the_terminal_does_not_reach_it(lane: DeviceLane) -> None:
    """Not even while it loads torch, before it can ignore anything: a traceback came into its owner's terminal."""
    assert os.getpgid(lane.pid) != os.getpgid(0)


@pytest.mark.slow
def test_it_stands_back_and_ends_with_its_daemon(lane: DeviceLane, listener: Listener) -> None:
    """Lowest priority; when its input closes it ends by itself."""
    lane.submit(SET_UP, {})
    listener.answer()
    process = psutil.Process(lane.pid)
    assert process.nice() == 19
    lane.close()
    assert not process.is_running()

"""Lanes: the jobs of two stages with two shards each, done by hand, against one process that does it all."""

from __future__ import annotations

import math
import queue
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from node.compute import checkpoint, seals
from node.compute.device_performer import DevicePerformer
from node.compute.forms import packed
from node.compute.lane import Lane, Outcome, input_refs
from node.compute.lanes import ServerPerformer
from node.compute.layout import StageLayout
from node.compute.plan_parts import partition_of
from node.compute.shard import ShardWorker
from node.compute.wire import encode
from node.compute.worker import StageWorker
from node.data.allowed import Allowed
from node.data.dataset import Dataset
from node.machine import jobs
from node.machine.numbers import clip_factor
from node.process.store import TensorStore
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.base.machine import Computed, ComputeFailed
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import (
    BatchSection,
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    WireSection,
)
from protocol.trust.identity import Identity
from tests.node.compute.test_seals import COORDINATOR, OTHER, SERVERS
from tests.node.compute.test_seals import sealer as sealer_of

STAGES = ((0, 4), (4, 8))


def small_run(delay: int, folder: str = "checkpoints", gradients: str = "fp64", parameters: str = "fp32") -> RunConfig:
    """Three layers of width 16 on the grammar."""
    return RunConfig(
        steps=20,
        model=ModelSection(layers=3, hidden=16, heads=2, kv_heads=1, feed_forward=24, context=12),
        data=DataSection(source="builtin:grammar"),
        optimizer=OptimizerSection(warmup_steps=2, learning_rate=1e-2),
        batch=BatchSection(microbatches=3, samples=2, delay=delay),  # type: ignore[arg-type]
        wire=WireSection(
            activations_up="fp32",
            activations_down="fp32",
            gradients=gradients,  # type: ignore[arg-type]
            parameters=parameters,  # type: ignore[arg-type]
        ),
        checkpoint=CheckpointSection(folder=folder),
    )


PLAN = Plan(
    generation=1,
    ledger_generation=1,
    restore_step=-1,
    stages=tuple(
        StagePlan(
            servers=tuple(
                ServerPlan(node=NodeId(f"{role}{first}"), role=role, addresses=()) for role in ("front", "back")
            ),
        )
        for first, _ in STAGES
    ),
    course=Course(tuple(Chunk(first, end, stage) for stage, (first, end) in enumerate(STAGES)), ((0, 1),)),
)


class Bench:
    """A store and the performers of two stages' servers and volunteers; does jobs at once, as a driver would."""

    def __init__(
        self, config: RunConfig, folder: Path, coordinator: Identity = COORDINATOR, states: Path | None = None
    ) -> None:
        """`folder`: what is lent to the run; the servers' states lie there, or in `states`."""
        self.config = config
        sealer = sealer_of(SERVERS[0], coordinator)
        self.store = TensorStore()
        self.key = 1000
        allowed = Allowed(checkpoints=(folder,))
        self.servers = [
            [ServerPerformer((states or folder) / f"{stage}{shard}", 1, allowed, sealer) for shard in range(2)]
            for stage in range(2)
        ]
        self.devices = [DevicePerformer() for _ in range(2)]
        vocabulary, self.data_hash, _ = self.do(self.servers[0][0], jobs.PrepareData(config))
        for stage in range(2):
            self.do(self.devices[stage], jobs.SetUpDevice(config, vocabulary, PLAN, stage))
            for shard in range(2):
                self.do(self.servers[stage][shard], jobs.SetUpServer(config, vocabulary, PLAN, stage, shard))

    def do(self, performer: Any, job: Any) -> Any:
        outcome = performer.perform(job, {ref.key: self.store.get(ref.key) for ref in input_refs(job)})
        assert isinstance(outcome.fact, Computed), outcome.fact
        for ref, buffer in outcome.tensors:
            self.store.put(ref.key, buffer, ref.shape, ref.form)
        return outcome.fact.result

    def fresh(self) -> int:
        self.key += 1
        return self.key

    def start(self, checkpoint_step: int = -1) -> list[list[bytes]]:
        return [[self.do(server, jobs.StartShard(checkpoint_step)) for server in stage] for stage in self.servers]

    def fetch(self, version: int, base: int | None = None) -> None:
        """Both devices get a version from their shards, whole or as what changed since `base`."""
        for stage, device in enumerate(self.devices):
            served = []
            for server in self.servers[stage]:
                grid = self.fresh() if self.config.wire.gradients == "gi" else None
                served.append(self.do(server, jobs.ServeParameters(version, self.fresh(), grid, base)))
            shards = tuple(refs[0] for refs in served)
            self.do(device, jobs.LoadParameters(version, shards, tuple(refs[1] for refs in served if len(refs) > 1)))

    def step(self, step: int, recompute: bool = False) -> tuple[float, list[list[bytes]]]:
        """One step as volunteers and servers do it: (mean loss, digests)."""
        version = self.config.version_of(step)
        first, last = self.devices
        losses = []
        for microbatch in range(self.config.batch.microbatches):
            front, back, loss = (TaskId(step, microbatch, position, "F") for position in range(3))
            tokens, labels = self.do(self.servers[0][0], jobs.LoadBatch(step, microbatch, self.fresh(), self.fresh()))
            hidden = self.do(first, jobs.Forward(front, version, tokens, self.fresh()))
            end = jobs.RouteEnd((back, loss, back), version, hidden, labels, self.fresh(), accumulator=7)
            loss_sum, gradient = self.do(last, end)
            losses.append(loss_sum)
            if recompute:
                self.do(first, jobs.DropGraphs((front,)))
            backward = TaskId(step, microbatch, 0, "B")
            given = tokens if recompute else None
            self.do(first, jobs.Backward(backward, version, gradient, given, None, accumulator=8))
        norms: list[float] = []
        for stage, device in enumerate(self.devices):
            parts = self.do(device, jobs.TakeGradient(7 + (stage == 0), (self.fresh(), self.fresh())))
            for server, part in zip(self.servers[stage], parts, strict=True):
                self.do(server, jobs.Fold(step, part))
                square_norm, finite = self.do(server, jobs.Reduce(step, 1))
                assert finite
                norms.append(square_norm)
        factor = clip_factor([math.fsum(norms[:2]), math.fsum(norms[2:])], self.config.optimizer.clip_norm)
        digests = [[self.do(server, jobs.Apply(step, factor, False)) for server in stage] for stage in self.servers]
        return math.fsum(losses) / self.config.step_tokens, digests


def in_one_process(config: RunConfig, steps: int) -> tuple[list[float], torch.Tensor]:
    """The same run on one worker with one shard: losses and final weights."""
    data = Dataset(config)
    worker = StageWorker(config, data.vocabulary, 0, config.block_count)
    shard = ShardWorker(StageLayout.whole(config, data.vocabulary), 0, 1)
    shard.initial()
    losses = []
    for step in range(steps):
        version = config.version_of(step)
        worker.set_params(version, [shard.params(version)])
        total = 0.0
        for microbatch in range(config.batch.microbatches):
            tokens, labels = (torch.from_numpy(part).long() for part in data.batch(step, microbatch))
            total += worker.tail(version, tokens, labels, "sum")[0]
        shard.fold(step, worker.take_gradient("sum"))
        gradient, square_norm, _ = shard.reduce(step)
        shard.apply(step, gradient, step, clip_factor([square_norm], config.optimizer.clip_norm))
        losses.append(total / config.step_tokens)
    return losses, shard.params(steps)


def weights(bench: Bench, version: int) -> torch.Tensor:
    """All weights of a version, stage by stage and shard by shard."""
    parts = []
    for stage in bench.servers:
        for server in stage:
            (ref,) = bench.do(server, jobs.ServeParameters(version, bench.fresh()))
            parts.append(torch.frombuffer(bytearray(bench.store.get(ref.key)), dtype=torch.float32))
    return torch.cat(parts)


@pytest.mark.parametrize("delay", [0, 1])
def test_two_stages_of_two_shards_are_one_process(tmp_path: Path, delay: int) -> None:
    """Losses to 1e-6 and weights to 1e-6 relative over six steps, half of them with every backward recomputed."""
    config = small_run(delay)
    bench = Bench(config, tmp_path)
    bench.start()
    losses = []
    for step in range(6):
        bench.fetch(config.version_of(step))
        losses.append(bench.step(step, recompute=step % 2 == 1)[0])
    expected, flat = in_one_process(config, 6)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0]
    found = weights(bench, 6)
    assert float((found - flat).norm() / flat.norm()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 1])
def test_parameters_that_come_as_changes_make_the_run_of_whole_ones(tmp_path: Path, delay: int) -> None:
    """Losses and digests to the last bit, with either way from step to step; and other ones than fp32's."""
    runs = []
    for by_changes, form in ((True, "p12"), (False, "p12"), (False, "fp32")):
        config = small_run(delay, gradients="gi", parameters=form)
        bench = Bench(config, tmp_path / f"{by_changes}{form}")
        bench.start()
        told: list[object] = []
        for step in range(5):
            version = config.version_of(step)
            bench.fetch(version, version - 1 if by_changes and version else None)
            told.append(bench.step(step))
        runs.append(told)
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("gradients", ["gi", "fp64"])
def test_an_activation_that_overflows_makes_a_step_that_is_skipped(tmp_path: Path, gradients: str) -> None:
    """No job fails of it: the next stage computes NaN from what was marked, as does the one that gets its gradient, and
    every shard of both says that its sum is not finite. The step leaves the weights as they are."""
    config = small_run(0, gradients=gradients)
    wire = WireSection(activations_up="q8", activations_down="q8", gradients=gradients)  # type: ignore[arg-type]
    bench = Bench(msgspec.structs.replace(config, wire=wire), tmp_path)
    before = bench.start()
    bench.fetch(0)
    front, back, loss = (TaskId(0, 0, position, "F") for position in range(3))
    tokens, labels = bench.do(bench.servers[0][0], jobs.LoadBatch(0, 0, bench.fresh(), bench.fresh()))
    hidden = bench.do(bench.devices[0], jobs.Forward(front, 0, tokens, bench.fresh()))
    overflown = torch.zeros(hidden.shape)
    overflown.view(-1)[3] = torch.inf
    data = encode(overflown, "q8")
    hidden = TensorRef(bench.fresh(), hidden.shape, "q8", len(data))
    bench.store.put(hidden.key, data, hidden.shape, "q8")
    end = jobs.RouteEnd((back, loss, back), 0, hidden, labels, bench.fresh(), accumulator=7)
    loss_sum, gradient = bench.do(bench.devices[1], end)
    assert math.isnan(loss_sum)
    bench.do(bench.devices[0], jobs.Backward(TaskId(0, 0, 0, "B"), 0, gradient, None, None, accumulator=8))
    for stage, device in enumerate(bench.devices):
        parts = bench.do(device, jobs.TakeGradient(7 + (stage == 0), (bench.fresh(), bench.fresh())))
        for server, part, digest in zip(bench.servers[stage], parts, before[stage], strict=True):
            bench.do(server, jobs.Fold(0, part))
            assert bench.do(server, jobs.Reduce(0, 1))[1] is False
            assert bench.do(server, jobs.Apply(0, 0.0, True)) == digest


@pytest.mark.parametrize("token", [-1, 2**31 - 1])
def test_tokens_that_no_vocabulary_has_fail_the_job_and_never_reach_the_device(tmp_path: Path, token: int) -> None:
    """As a stage's input and as labels: an accelerator would end its process, or read what lies behind the table."""
    bench = Bench(small_run(0), tmp_path)
    bench.start()
    bench.fetch(0)
    tokens, labels = bench.do(bench.servers[0][0], jobs.LoadBatch(0, 0, bench.fresh(), bench.fresh()))
    hidden = bench.do(bench.devices[0], jobs.Forward(TaskId(0, 0, 0, "F"), 0, tokens, bench.fresh()))
    false = torch.zeros(tokens.shape, dtype=torch.int64)
    false.view(-1)[5] = token
    data = encode(false, "int32")
    tokens = labels = TensorRef(bench.fresh(), tokens.shape, "int32", len(data))
    bench.store.put(tokens.key, data, tokens.shape, "int32")
    ends = (TaskId(0, 0, 1, "F"), TaskId(0, 0, 2, "L"), TaskId(0, 0, 1, "B"))
    for device, job in (
        (bench.devices[0], jobs.Forward(TaskId(0, 1, 0, "F"), 0, tokens, bench.fresh())),
        (bench.devices[1], jobs.RouteEnd(ends, 0, hidden, labels, bench.fresh(), accumulator=7)),
    ):
        outcome = device.perform(job, {ref.key: bench.store.get(ref.key) for ref in input_refs(job)})
        assert isinstance(outcome.fact, ComputeFailed) and "vocabulary" in outcome.fact.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("delay", "shared", "gradients"), [(0, True, "fp64"), (0, True, "gi"), (1, True, "gi"), (1, False, "fp64")]
)
def test_a_restart_from_snapshot_or_checkpoint_goes_on_bit_by_bit(
    tmp_path: Path, delay: int, shared: bool, gradients: str
) -> None:
    """Fresh processes that take the state from disk produce the digests of those that never stopped.

    Also where the servers share no folder and each has only its own part.
    """
    config = small_run(delay, str(tmp_path / "shared") if shared else "mine", gradients)
    bench = Bench(config, tmp_path)
    digests = bench.start()
    for step in range(3):
        bench.fetch(config.version_of(step))
        _, digests = bench.step(step)
    files = [[bench.do(server, jobs.WriteSnapshot(3)) for server in stage] for stage in bench.servers]
    parts = []
    for stage, servers in enumerate(bench.servers):
        for shard, server in enumerate(servers):
            parts.append((stage, shard, *bench.do(server, jobs.WriteCheckpoint(3, 3))))
    bench.do(bench.servers[0][0], jobs.WriteManifest(3, tuple(parts), 18))
    bench.fetch(config.version_of(3))
    expected = bench.step(3)

    home = checkpoint.run_folder(tmp_path / ("shared" if shared else "00/mine"), config)
    assert checkpoint.scan_checkpoints(home)[0] == ((3,) if shared else ())
    manifest = checkpoint.read_manifest(checkpoint.step_folder(home, 3))
    assert (manifest.data_cursor, manifest.data_hash) == (18, bench.data_hash)
    assert manifest.partition == partition_of(PLAN)

    vouched = seals.verify(checkpoint.step_folder(home, 3), manifest, manifest.parts if shared else ())
    assert vouched.manifest is not None and len(vouched.servers) == (4 if shared else 0)
    if shared:
        stranger = Bench(config, tmp_path, coordinator=OTHER)
        outcome = stranger.servers[0][0].perform(jobs.StartShard(3), {})
        assert isinstance(outcome.fact, ComputeFailed) and "another coordinator" in outcome.fact.reason

    restored = Bench(config, tmp_path)
    assert restored.start(checkpoint_step=3) == digests
    restored.fetch(config.version_of(3))
    assert restored.step(3) == expected

    resumed = Bench(config, tmp_path)
    for stage in range(2):
        for shard in range(2):
            job = jobs.LoadSnapshot(3, files[stage][shard])
            assert resumed.do(resumed.servers[stage][shard], job) == digests[stage][shard]
    resumed.fetch(config.version_of(3))
    assert resumed.step(3) == expected


def test_ledgers_that_go_on_take_the_shard_out_of_the_lane_twice(tmp_path: Path) -> None:
    """From those that they continue, and from others that have begun with the same; not from what came to nothing."""
    config = small_run(1)
    bench = Bench(config, tmp_path)
    bench.start()
    bench.fetch(0)
    _, digests = bench.step(0)
    server = bench.servers[0][0]
    vocabulary, _, _ = bench.do(server, jobs.PrepareData(config))

    def begin(**plan: int) -> Any:
        bench.do(server, jobs.SetUpServer(config, vocabulary, msgspec.structs.replace(PLAN, **plan), 0, 0))
        return bench.do(server, jobs.StartShard(1, continues=1))

    assert begin(generation=2, ledger_generation=2, restore_step=1, continues=1) == digests[0][0]
    assert begin(generation=3, ledger_generation=3, restore_step=1, continues=1) == digests[0][0]
    assert begin(generation=4, ledger_generation=4, restore_step=1, continues=2) == b""


def test_a_server_that_keeps_its_own_parts_finds_those_that_are_there(tmp_path: Path) -> None:
    """Of what it was told: it has no manifest, or one that names parts of others. What somebody has deleted is gone,
    and before it has a place nothing is its own."""
    config = small_run(0, "mine")
    bench = Bench(config, tmp_path)
    bench.start()
    parts = [
        (stage, shard, *bench.do(server, jobs.WriteCheckpoint(3, 0)))
        for stage, servers in enumerate(bench.servers)
        for shard, server in enumerate(servers)
    ]
    bench.do(bench.servers[0][0], jobs.WriteManifest(3, tuple(parts), 18))
    look = jobs.FindCheckpoints(config, (3, 2))
    decider, other = bench.servers[0][0], bench.servers[1][1]
    assert bench.do(decider, look) == bench.do(other, look) == (3,)
    assert bench.do(decider, jobs.FindCheckpoints(config)) == (), "parts of others are not here"
    assert bench.do(ServerPerformer(tmp_path / "11", 1, Allowed(), None), look) == ()
    for state in ("00", "11"):
        home = checkpoint.step_folder(checkpoint.run_folder(tmp_path / state / "mine", config), 3)
        for part in home.glob("*.safetensors"):
            part.unlink()
    assert bench.do(decider, look) == bench.do(other, look) == ()


def test_a_server_that_keeps_its_own_parts_begins_from_no_other_history(tmp_path: Path) -> None:
    """Step 1 comes out one way, and otherwise after going back; a run that goes back twice has none of it meanwhile."""
    bench = Bench(small_run(0, "mine"), tmp_path)
    bench.start()
    server, look = bench.servers[1][1], jobs.FindCheckpoints(bench.config, (1,))
    digests = []
    for skipped in (False, True, False):
        bench.fetch(0)
        digest = bench.step(0)[1][1][1] if not skipped else skip(bench, server)
        bench.do(server, jobs.WriteCheckpoint(1, 1))
        assert bench.do(server, look) == (1,)
        assert bench.do(server, jobs.StartShard(1)) == digest
        digests.append(digest)
        for stage in bench.servers:
            for each in stage:
                bench.do(each, jobs.StartShard(-1, undone=True))
        assert bench.do(server, look) == ()
    assert digests[0] == digests[2] != digests[1]


def skip(bench: Bench, server: ServerPerformer) -> bytes:
    """Version 1 of one shard by a step that is skipped."""
    size = bench.do(server, jobs.ServeParameters(0, bench.fresh()))[0].shape[0]
    bad = bench.store.add(torch.full((size,), math.inf).numpy().tobytes(), (size,), "fp32")
    bench.do(server, jobs.Fold(0, bad))
    bench.do(server, jobs.Reduce(0, 1))
    digest: bytes = bench.do(server, jobs.Apply(0, 0.0, True))
    return digest


def test_servers_with_another_cut_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Two stages of two servers wrote it; one stage of three serves the same weights, of both versions that the next
    step needs, on the same grid. A checkpoint of another coordinator's servers is refused here, too."""
    config = small_run(1, str(tmp_path / "shared"), "gi")
    bench = Bench(config, tmp_path)
    bench.start()
    for step in range(3):
        bench.fetch(config.version_of(step))
        bench.step(step)
    parts = [
        (stage, shard, *bench.do(server, jobs.WriteCheckpoint(3, 3)))
        for stage, servers in enumerate(bench.servers)
        for shard, server in enumerate(servers)
    ]
    bench.do(bench.servers[0][0], jobs.WriteManifest(3, tuple(parts), 18))
    end = max(chunk.end_block for chunk in PLAN.course.chunks)
    nodes = tuple(ServerPlan(node=NodeId(f"new{shard}"), role="both", addresses=()) for shard in range(3))
    plan = msgspec.structs.replace(
        PLAN, stages=(StagePlan(servers=nodes),), course=Course((Chunk(0, end, 0),), ((0,),)), restore_step=3
    )
    allowed = Allowed(checkpoints=(tmp_path,))
    vocabulary = bench.do(bench.servers[0][0], jobs.PrepareData(config))[0]

    def start(shard: int, coordinator: Identity) -> tuple[ServerPerformer, Any]:
        server = ServerPerformer(tmp_path / f"new{shard}", 1, allowed, sealer_of(SERVERS[0], coordinator))
        bench.do(server, jobs.SetUpServer(config, vocabulary, plan, 0, shard))
        return server, server.perform(jobs.StartShard(3), {}).fact

    started = [start(shard, COORDINATOR) for shard in range(3)]
    assert all(isinstance(fact, Computed) for _, fact in started), started
    for version in (2, 3):
        old, new = (
            [bench.do(server, jobs.ServeParameters(version, bench.fresh(), bench.fresh())) for server in servers]
            for servers in ([each for stage in bench.servers for each in stage], [server for server, _ in started])
        )
        assert b"".join(bytes(bench.store.get(params.key)) for params, _ in new) == b"".join(
            bytes(bench.store.get(params.key)) for params, _ in old
        )
        steps = [
            np.concatenate([packed.unpack(bench.store.get(grid.key), grid.shape[0]) for _, grid in served])
            for served in (old, new)
        ]
        assert np.array_equal(steps[0], steps[1])
    _, refused = start(1, OTHER)
    assert isinstance(refused, ComputeFailed) and "another coordinator" in refused.reason


def test_a_skipped_step_keeps_the_weights(tmp_path: Path) -> None:
    """Version step + 1 of a skipped step has the content, and so the digest, of version step."""
    config = small_run(0)
    bench = Bench(config, tmp_path)
    digests = bench.start()
    server = bench.servers[1][1]
    elements = int(weights(bench, 0).numel())
    assert elements > 0
    size = bench.do(server, jobs.ServeParameters(0, bench.fresh()))[0].shape[0]
    bad = bench.store.add(torch.full((size,), math.inf).numpy().tobytes(), (size,), "fp32")
    bench.do(server, jobs.Fold(0, bad))
    assert bench.do(server, jobs.Reduce(0, 1))[1] is False
    assert bench.do(server, jobs.Apply(0, 0.0, True)) == digests[1][1]


def test_a_skipped_step_can_be_kept_on_disk(tmp_path: Path) -> None:
    """With delayed updates the file holds this version's weights and the last one's, which are the same after a skip:
    snapshot and checkpoint are written all the same, and a restart from either goes on with equal digests."""
    config = small_run(1, folder=str(tmp_path / "shared"))
    bench = Bench(config, tmp_path)
    bench.start()
    server = bench.servers[1][1]
    digest = skip(bench, server)
    file = bench.do(server, jobs.WriteSnapshot(1))
    assert bench.do(server, jobs.WriteCheckpoint(1, 1))[1] > 0
    resumed = Bench(config, tmp_path)
    resumed.start()
    assert bench.do(resumed.servers[1][1], jobs.LoadSnapshot(1, file)) == digest


@pytest.mark.parametrize("form", ["fp32", "bf16", "q8", "d4", "fp64"])
def test_the_lane_says_how_large_a_result_and_a_part_are(tmp_path: Path, form: str) -> None:
    """The root mean square, and the sum of squares; infinite where a value is not finite."""
    bench = Bench(small_run(0), tmp_path)
    server = bench.servers[0][1]
    shard = server._here[1]
    count = shard.end - shard.begin

    def kept(values: torch.Tensor) -> TensorRef:
        buffer, key = encode(values, form), bench.fresh()
        bench.store.put(key, buffer, tuple(values.shape), form)
        return TensorRef(key, tuple(values.shape), form, len(buffer))  # type: ignore[arg-type]

    values = torch.full((4, 32), 3.0) * torch.tensor([1.0, -1.0]).repeat(16)
    size = bench.do(server, jobs.MeasureResult(TaskId(0, 0, 0, "F"), "F", NodeId("f0"), kept(values)))
    assert size == pytest.approx(3.0, rel=7e-2 if form == "d4" else 1e-2)
    values[1, 5] = math.inf
    assert bench.do(server, jobs.MeasureResult(TaskId(0, 0, 0, "F"), "F", NodeId("f0"), kept(values))) == math.inf
    if form in ("fp32", "fp64"):
        gradient = torch.full((count,), 2.0)
        said = ContributionId(NodeId("f0"), 1, 1)
        assert bench.do(server, jobs.Measure(said, 0, 0, kept(gradient))) == pytest.approx(4.0 * count)
        gradient[0] = math.nan
        assert bench.do(server, jobs.Measure(said, 0, 0, kept(gradient))) == math.inf


def test_a_failing_job_is_an_answer_and_the_lane_goes_on(tmp_path: Path) -> None:
    """Unknown versions, wrong sizes and missing files come back as `ComputeFailed` with a sentence, in order."""
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    config = small_run(0)
    lane = Lane("server", lambda: ServerPerformer(tmp_path), outcomes.put)
    lane.submit(jobs.StartShard(-1), {})
    lane.submit(jobs.PrepareData(config), {})
    lane.submit(jobs.SetUpServer(config, 259, PLAN, 0, 0), {})
    lane.submit(jobs.LoadSnapshot(1, "snapshot-00000001.safetensors"), {})
    lane.submit(jobs.Fold(0, TensorRef(1, (2,), "fp32", 8)), {1: bytes(8)})
    lane.submit(jobs.StartShard(-1), {})
    facts = [outcomes.get(timeout=30).fact for _ in range(6)]
    lane.close()
    failed = [fact.reason for fact in facts if isinstance(fact, ComputeFailed)]
    assert [isinstance(fact, Computed) for fact in facts] == [False, True, True, False, False, True]
    assert failed[0] == "no shard was set up"
    assert "snapshot-00000001.safetensors" in failed[1]
    assert "gradient of shape (2,)" in failed[2]


FIRST_BACKWARD = """
import dataclasses, sys, torch
from msgspec.structs import replace
from node.compute.device_performer import DevicePerformer
from node.compute.pulled import gradients_of
from node.compute.split_backward import input_gradients
from tests.node.process.test_device_lane import SET_UP
split = sys.argv[1] == "split"
compute = replace(SET_UP.config.compute, split_backward=split)
job = dataclasses.replace(SET_UP, config=replace(SET_UP.config, compute=compute))
assert DevicePerformer().perform(job, {}).fact.result
before = set(sys.modules)
x, matrix = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
if split:
    input_gradients(x @ matrix, torch.ones(3, 3), [x], [matrix])[1].finish()
else:
    gradients_of([x @ matrix], [torch.ones(3, 3)], [x, matrix])
print(len(set(sys.modules) - before), "sympy" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "split"])
def test_a_device_that_is_set_up_has_loaded_what_a_backward_needs(how: str) -> None:
    """Torch loads five hundred modules, for half a second, where a backward is in two halves: while the clock of a
    lease ran, so that a busy computer which had only just begun was said not to bring its tasks back in time. A whole
    one needs none of them, and who has started again does not wait for them."""
    ran = subprocess.run([sys.executable, "-c", FIRST_BACKWARD, how], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split() == ["0", str(how == "split")], ran.stderr

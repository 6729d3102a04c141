"""Honest work for `tests.benchmarks.blame`: a small run's tasks, with all that its servers would keep for an audit.

    python -m tests.benchmarks.honest_work FORM TASKS SEED [--threads N] [--regroup] [--light] [--bf16]

Three stages of one server each and a volunteer for each, by the jobs that both do in a run, with real training from
step to step. Standard output is a `Hello`, then `Step`s until so many tasks are done, each behind its length. The
process is one of its own, so that its threads, its processor's instructions and its torch can be others.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from node.machine import jobs
from node.machine.numbers import clip_factor
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.run.audits import Claim, Kept
from protocol.run.config_file import change_run
from protocol.run.course import Chunk, Course
from protocol.run.plan import Plan, ServerPlan, StagePlan
from protocol.run.run import RunConfig

STAGES = ((0, 3), (3, 6), (6, 8))
FORMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "plain": (
        "wire.activations_up=fp32", "wire.activations_down=fp32", "wire.gradients=fp64", "wire.parameters=fp32",
    ),
    "halves": (
        "wire.activations_up=bf16", "wire.activations_down=bf16", "wire.gradients=fp32", "wire.parameters=bf16",
    ),
    "bf16": ("compute.dtype=bf16",),
}  # fmt: skip
"""Keys of a run's file."""
SIZES = (
    "model.layers=3", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.feed_forward=128",
    "model.context=32", "data.source=builtin:grammar", "batch.microbatches=4", "optimizer.warmup_steps=5",
)  # fmt: skip
FRAME_BYTES = 8


class KeptOf(msgspec.Struct, frozen=True):
    """What servers keep of a task (a backward), or of the sum."""

    task: TaskId | None
    kinds: tuple[Kept, ...]
    brought_by: tuple[NodeId | str, ...]
    tensors: tuple[TensorRef, ...]


class Contributed(msgspec.Struct, frozen=True):
    """A contribution, with all that an audit of it needs."""

    contribution: ContributionId
    stage: int
    step: int
    tasks: tuple[TaskId, ...]
    losses: tuple[float, ...]
    kept: tuple[KeptOf, ...]

    @property
    def task_count(self) -> int:
        """Tasks that were computed: a forward beside each backward, and the losses."""
        return len(self.tasks) + sum(task.op == "B" for task in self.tasks)

    def claim_of(self, claimed: TensorRef) -> Claim:
        """What a tensor of it is a claim of."""
        for kept in self.kept:
            for kind, ref in zip(kept.kinds, kept.tensors, strict=True):
                if ref.key == claimed.key:
                    return "gradient" if kind == "part" else kind  # type: ignore[return-value]
        raise KeyError(claimed.key)

    def false_one(self, other: Contributed) -> Contributed:
        """The same under another number, with the sum of another one."""
        name = msgspec.structs.replace(self.contribution, number=self.contribution.number + 1)
        kept = tuple(each for each in self.kept if each.task is not None)
        return msgspec.structs.replace(
            self, contribution=name, kept=(*kept, *(e for e in other.kept if e.task is None))
        )


class Hello(msgspec.Struct, frozen=True):
    torch: str
    vocabulary: int


class Step(msgspec.Struct, frozen=True):
    """One step: the version it runs on, and what was contributed. `buffers` by the references' keys."""

    version: int
    parameters: tuple[TensorRef, ...]
    grids: tuple[TensorRef, ...]
    contributions: tuple[Contributed, ...]
    buffers: dict[int, bytes]


def run_of(form: str, seed: int = 1) -> RunConfig:
    return change_run(RunConfig(steps=10_000, seed=seed), (*SIZES, "stages.count=3", *FORMS[form]))


def plan_of() -> Plan:
    """Three stages, a server each that is front, back and shard."""
    return Plan(
        generation=1,
        ledger_generation=1,
        restore_step=-1,
        stages=tuple(
            StagePlan(servers=(ServerPlan(node=NodeId(f"server-{stage}"), role="both", addresses=()),))
            for stage in range(len(STAGES))
        ),
        course=Course(
            tuple(Chunk(*blocks, stage) for stage, blocks in enumerate(STAGES)), (tuple(range(len(STAGES))),)
        ),
    )


def write(out: IO[bytes], message: Hello | Step) -> None:
    data = msgspec.msgpack.encode(message)
    out.write(len(data).to_bytes(FRAME_BYTES, "big") + data)
    out.flush()


def read(source: IO[bytes]) -> tuple[Hello, Iterator[Step]]:
    """What `write` wrote, to its end."""

    def frames() -> Iterator[bytes]:
        while head := source.read(FRAME_BYTES):
            yield source.read(int.from_bytes(head, "big"))

    left = frames()
    return msgspec.msgpack.decode(next(left), type=Hello), (msgspec.msgpack.decode(data, type=Step) for data in left)


class Work:
    """The servers' and the volunteers' lanes, without anything between them."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        from node.compute.device_performer import DevicePerformer
        from node.compute.lanes import ServerPerformer

        self._options = options
        self._config = run_of(options.form, options.seed)
        config = change_run(self._config, ("compute.dtype=bf16",)) if options.bf16 else self._config
        self._buffers: dict[int, Any] = {}
        self._key = 0
        self._number = 0
        self._rng = random.Random(options.seed)
        self.members = [NodeId(name) for name in options.members.split(",")]
        plan = plan_of()
        self._servers = [ServerPerformer(folder / str(stage), options.threads) for stage in range(len(STAGES))]
        self._devices = [DevicePerformer(options.threads) for _ in STAGES]
        self.vocabulary, _, _ = self._do(self._servers[0], jobs.PrepareData(self._config))
        for stage in range(len(STAGES)):
            self._do(self._devices[stage], jobs.SetUpDevice(config, self.vocabulary, plan, stage))
            self._do(self._servers[stage], jobs.SetUpServer(self._config, self.vocabulary, plan, stage, 0))
            self._do(self._servers[stage], jobs.StartShard(-1))
            if options.light:
                worker = self._devices[stage]._worker
                assert worker is not None
                for model in worker._models:
                    model.keeps_inputs_only = True

    def _do(self, performer: Any, job: Any) -> Any:
        from node.compute.lane import input_refs
        from protocol.base.machine import Computed

        outcome = performer.perform(job, {ref.key: self._buffers[ref.key] for ref in input_refs(job)})
        assert isinstance(outcome.fact, Computed), outcome.fact
        for ref, buffer in outcome.tensors:
            self._buffers[ref.key] = buffer
        return outcome.fact.result

    def _fresh(self) -> int:
        self._key += 1
        return self._key

    def step(self, step: int) -> Step:
        """One step: each stage brings two contributions of half its tasks."""
        self._buffers = {}
        version = self._config.version_of(step)
        parameters, grids = [], []
        for server, device in zip(self._servers, self._devices, strict=True):
            grid = self._fresh() if self._config.wire.gradients == "gi" else None
            served = self._do(server, jobs.ServeParameters(version, self._fresh(), grid))
            parameters.append(served[0])
            grids += served[1:]
            self._do(device, jobs.LoadParameters(version, (served[0],), tuple(served[1:])))
        half = self._config.batch.microbatches // 2
        made = [each for first in (0, half) for each in self._contribute(step, version, range(first, first + half))]
        squares = []
        for stage, server in enumerate(self._servers):
            for part in (kept.tensors[0] for each in made if each.stage == stage for kept in each.kept[-1:]):
                self._do(server, jobs.Fold(step, part))
            square, finite = self._do(server, jobs.Reduce(step, 2))
            assert finite
            squares.append(square)
        wanted = {ref.key for ref in (*parameters, *grids)}
        wanted |= {ref.key for each in made for kept in each.kept for ref in kept.tensors}
        buffers = {key: bytes(buffer) for key, buffer in self._buffers.items() if key in wanted}
        factor = clip_factor(squares, self._config.optimizer.clip_norm)
        for server, device in zip(self._servers, self._devices, strict=True):
            self._do(server, jobs.Apply(step, factor, False))
            if self._config.version_of(step + 1) > version:
                self._do(server, jobs.DropVersions(version, step + 1))
                self._do(device, jobs.DropParameters(version))
        return Step(version, tuple(parameters), tuple(grids), tuple(made), buffers)

    def _contribute(self, step: int, version: int, microbatches: range) -> list[Contributed]:
        """Those microbatches through all stages and back; sums in their order, or in the opposite one."""
        kept: list[list[KeptOf]] = [[] for _ in STAGES]
        losses: list[float] = []
        by = [self._rng.choice(self.members) for _ in STAGES]
        regroup = self._options.regroup
        later: list[jobs.WeightGradient] = []
        for microbatch in reversed(microbatches) if regroup else microbatches:
            load = jobs.LoadBatch(step, microbatch, self._fresh(), self._fresh())
            tokens, labels = self._do(self._servers[0], load)
            first = self._do(self._devices[0], jobs.Forward(_task(step, microbatch, 0), version, tokens, self._fresh()))
            second = self._do(self._devices[1], jobs.Forward(_task(step, microbatch, 1), version, first, self._fresh()))
            tasks = (_task(step, microbatch, 2), _task(step, microbatch, 3, "L"), _task(step, microbatch, 2, "B"))
            end = jobs.RouteEnd(tasks, version, second, labels, self._fresh(), 2, regroup)
            loss, gradient = self._do(self._devices[2], end)
            losses.append(loss)
            kept[2].append(
                KeptOf(tasks[2], ("input", "labels", "input_gradient"), ("", "", by[2]), (second, labels, gradient))
            )
            back = _task(step, microbatch, 1, "B")
            given = self._backward(back, version, gradient, first, 1)
            kept[1].append(
                KeptOf(
                    back, ("input", "output", "output_gradient", "input_gradient"), ("", by[1], "", by[1]),
                    (first, second, gradient, given),
                )
            )  # fmt: skip
            back = _task(step, microbatch, 0, "B")
            self._backward(back, version, given, tokens, 0)
            kept[0].append(
                KeptOf(back, ("input", "output", "output_gradient"), ("", by[0], ""), (tokens, first, given))
            )
            if regroup:
                later += [jobs.WeightGradient(_task(step, microbatch, stage, "B"), version, stage) for stage in (1, 2)]
        for job in later:
            self._do(self._devices[job.accumulator], job)
        return [self._sum(step, stage, by[stage], kept[stage], losses) for stage in range(len(STAGES))]

    def _backward(self, task: TaskId, version: int, dy: TensorRef, x: TensorRef, stage: int) -> Any:
        """From the kept graph; or anew, and in two parts where there are two."""
        regroup, device = self._options.regroup, self._devices[stage]
        if regroup:
            self._do(device, jobs.DropGraphs((msgspec.structs.replace(task, op="F"),)))
        key = self._fresh() if stage else None
        later = regroup and stage > 0
        return self._do(device, jobs.Backward(task, version, dy, x if regroup else None, key, stage, later))

    def _sum(self, step: int, stage: int, by: NodeId, kept: list[KeptOf], losses: list[float]) -> Contributed:
        part = self._do(self._devices[stage], jobs.TakeGradient(stage, (self._fresh(),)))
        self._number += 2  # the one between is for a false one
        backwards = [each.task for each in kept if each.task is not None]
        ends = [_task(step, task.microbatch, 3, "L") for task in backwards if stage == len(STAGES) - 1]
        return Contributed(
            contribution=ContributionId(by, 1, self._number),
            stage=stage,
            step=step,
            tasks=(*ends, *backwards),
            losses=tuple(losses) if ends else (),
            kept=(*kept, KeptOf(None, ("part",), (by,), part)),
        )


def _task(step: int, microbatch: int, position: int, op: Any = "F") -> TaskId:
    return TaskId(step, microbatch, position, op)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", choices=[*FORMS])
    parser.add_argument("tasks", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("--members", default="somebody")
    parser.add_argument("--threads", type=int, default=1)
    for flag in ("--regroup", "--light", "--bf16"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args(words)
    import torch

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed
    with tempfile.TemporaryDirectory(prefix="honest-") as folder:
        work = Work(options, Path(folder))
        write(out, Hello(str(torch.__version__), work.vocabulary))
        done, step = 0, 0
        while done < options.tasks:
            made = work.step(step)
            write(out, made)
            done += sum(each.task_count for each in made.contributions)
            step += 1


if __name__ == "__main__":
    main(sys.argv[1:])

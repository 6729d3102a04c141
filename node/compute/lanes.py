"""Performs lane `server` with torch: a shard (`ShardWorker`), the data of stage 0, snapshots and checkpoints.

As with lane `device` (`node.compute.device_performer`), jobs come with buffers, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from node.compute import checkpoint, copies, evidence, seals
from node.compute.cut_anew import STATE, UNITS, Recut, about_part
from node.compute.doubts import doubt, doubted, trust
from node.compute.forms import p12
from node.compute.lane import Buffers, Outcome
from node.compute.layout import StageLayout
from node.compute.optimizer import mean_size
from node.compute.performer import Performer
from node.compute.places import Place, on, place_of, soon
from node.compute.plan_parts import chunks_of, partition_of
from node.compute.probe import probe
from node.compute.shard import ShardWorker, StepSum
from node.compute.side_by_side import SideBySide
from node.compute.store_lane import FETCHED, Door, forget_outgoing, outgoing
from node.data.allowed import Allowed
from node.data.dataset import Dataset
from node.data.goes_on import told_to
from node.machine import jobs
from protocol.base.ids import TensorRef
from protocol.base.machine import WorkGoesOn
from protocol.run.course import VALIDATION_FIRST
from protocol.trust.seals import Sealer


class ServerPerformer(Performer):
    """Lane `server`: the data of stage 0, a shard with its optimizer, and what lies on the disk.

    Args:
        state: the server's state folder; snapshots lie in it.
        allowed: what else of this machine the run may read and write.
        sealer: signs what this server writes into checkpoints.
        door: of the lane that brings checkpoints to an object store.
        side_by_side: how many threads share a job on the shard's vector: a fold, an update, a version that is packed.
    """

    def __init__(
        self,
        state: Path,
        threads: int = 1,
        allowed: Allowed | None = None,
        sealer: Sealer | None = None,
        door: Door | None = None,
        side_by_side: int = 1,
    ) -> None:
        super().__init__()
        torch.set_num_threads(threads)
        self._threads = SideBySide(side_by_side)
        self._state = state
        self._allowed = allowed or Allowed()
        self._sealer = sealer
        self._door = door or Door()
        self._data: Dataset | None = None
        self._place: jobs.SetUpServer | None = None
        self._shard: ShardWorker | None = None
        self._sums: dict[int, StepSum] = {}
        self._before: ShardWorker | None = None
        """The same shard under the ledgers that the present ones go on from."""
        self._digest: tuple[int, bytes] = (-1, b"")
        """Version and digest of what is copied at the moment."""

    def _methods(self) -> dict[type, tuple[str, Callable[[Any, Buffers], Any]]]:
        return {
            jobs.PrepareData: ("data", self._prepare_data),
            jobs.SetUpServer: ("other", self._set_up),
            jobs.LoadBatch: ("data", self._load_batch),
            jobs.StartShard: ("disk", self._start_shard),
            jobs.LoadSnapshot: ("disk", self._load_snapshot),
            jobs.CopyState: ("disk", self._copy_state),
            jobs.Measure: ("optimizer", self._measure),
            jobs.MeasureResult: ("other", lambda job, buffers: mean_size(self._decode(job.result, buffers))),
            jobs.Fold: ("optimizer", self._fold),
            jobs.Reduce: ("optimizer", self._reduce),
            jobs.Apply: ("optimizer", self._apply),
            jobs.ServeParameters: ("other", self._serve),
            jobs.DropVersions: ("other", self._drop_versions),
            jobs.WriteSnapshot: ("disk", self._write_snapshot),
            jobs.WriteCheckpoint: ("disk", self._write_checkpoint),
            jobs.WriteManifest: ("disk", self._write_manifest),
            jobs.WriteEvidence: ("disk", self._write_evidence),
            jobs.FindCheckpoints: ("disk", self._find_checkpoints),
            jobs.Benchmark: ("other", lambda job, _: probe(job.config, 1, threads=torch.get_num_threads()).flops_per_s),
        }

    # ---- data ----

    def _prepare_data(self, job: jobs.PrepareData, _: Buffers) -> tuple[int, str, int]:
        self._allowed.check(job.config)
        place_of(self._state, job.config)
        with told_to(lambda silent_s: self.deliver(Outcome(WorkGoesOn(job, silent_s)))):
            self._data = Dataset(job.config)
        found = self._data.describe()
        return found.vocabulary, found.data_hash, found.token_count

    def _load_batch(self, job: jobs.LoadBatch, _: Buffers) -> tuple[TensorRef, TensorRef]:
        if self._data is None:
            raise RuntimeError("the data was not read")
        if job.microbatch >= VALIDATION_FIRST:
            tokens, labels = self._data.validation_batch(job.microbatch - VALIDATION_FIRST)
        else:
            tokens, labels = self._data.batch(job.step, job.microbatch, job.mixtures, job.counts)
        return (
            self._encode(job.tokens, torch.from_numpy(tokens), "int32"),
            self._encode(job.labels, torch.from_numpy(labels), "int32"),
        )

    # ---- the shard ----

    @property
    def _here(self) -> tuple[jobs.SetUpServer, ShardWorker]:
        if self._place is None or self._shard is None:
            raise RuntimeError("no shard was set up")
        return self._place, self._shard

    def _set_up(self, job: jobs.SetUpServer, _: Buffers) -> int:
        self._allowed.check(job.config)
        place_of(self._state, job.config)
        self._door.begin(job.plan.ledger_generation)
        chunks = chunks_of(job.plan, job.stage)
        layout = StageLayout(job.config, job.vocabulary, *chunks[0], further=chunks[1:])
        self._before = self._shard if self._goes_on(job) else None
        self._digest = (-1, b"")
        self._place = job
        self._shard = ShardWorker(layout, job.shard, len(job.plan.stages[job.stage].servers), self._threads)
        self._sums = {}
        return self._shard.end - self._shard.begin

    def _goes_on(self, job: jobs.SetUpServer) -> bool:
        """Whether the shard that is here may have the version that the new ledgers go on from."""
        before = self._place
        if before is None or not job.plan.goes_on_from(before.plan):
            return False
        place = (job.stage, job.shard, job.vocabulary, partition_of(job.plan), job.config.config_hash())
        return place == (
            before.stage, before.shard, before.vocabulary, partition_of(before.plan), before.config.config_hash()
        )  # fmt: skip

    def _start_shard(self, job: jobs.StartShard, buffers: Buffers) -> bytes:
        _place, shard = self._here
        if job.undone:
            checkpoint.undo_after(self._checkpoints, job.checkpoint_step, self._shared)
        if job.continues >= 0:
            return self._take_version(job, buffers)
        if job.checkpoint_step >= 0:
            return self._load_checkpoint(job)
        return shard.initial()

    def _take_version(self, job: jobs.StartShard, buffers: Buffers) -> bytes:
        """From a copy, or out of memory; empty where neither is here."""
        _place, shard = self._here
        version, before, self._before = job.checkpoint_step, self._before, None
        if job.copy:
            pieces = [buffers[ref.key] for ref in job.copy]
            state = copies.state_of(pieces, version, job.digest, shard.end - shard.begin, shard.grid_blocks)
        elif before is not None and before.is_whole(version):
            state = before.snapshot(version)
        else:
            return b""
        return shard.load(version, **state)

    def _copy_state(self, job: jobs.CopyState, _: Buffers) -> tuple[TensorRef, int, bytes] | None:
        _place, shard = self._here
        if not shard.is_whole(job.version):
            return None
        words = copies.words_of(shard.snapshot(job.version))
        if self._digest[0] != job.version:
            self._digest = job.version, copies.digest_of(words, job.version)
        piece = copies.piece_of(words, job.piece, job.words)
        ref = TensorRef(job.key, piece.shape, "int32", piece.nbytes)
        self._made.append((ref, piece.data.cast("B")))
        return ref, copies.pieces_in(words, job.words), self._digest[1]

    def _measure(self, job: jobs.Measure, buffers: Buffers) -> float:
        return self._here[1].measure(job.version, job.part.form, buffers[job.part.key])

    def _fold(self, job: jobs.Fold, buffers: Buffers) -> None:
        _, shard = self._here
        if job.part.form == "gi":
            shard.fold_packed(job.step, buffers[job.part.key])
        else:
            shard.fold(job.step, self._decode(job.part, buffers))

    def _reduce(self, job: jobs.Reduce, _: Buffers) -> tuple[float, bool]:
        self._sums[job.step], square_norm, finite = self._here[1].reduce(job.step)
        return square_norm, finite

    def _apply(self, job: jobs.Apply, _: Buffers) -> bytes:
        _place, shard = self._here
        total = self._sums.pop(job.step)
        if job.skipped:
            return shard.skip(job.step)
        return shard.apply(job.step, total, job.step, job.scale * job.clip_factor, job.learning_rate)

    def _serve(self, job: jobs.ServeParameters, _: Buffers) -> tuple[TensorRef, ...]:
        place, shard = self._here
        form = place.config.wire.parameters
        if form == "p12":
            params = self._encode_fixed(job.key, shard, job.version, job.base)
        else:
            params = self._encode(job.key, shard.params(job.version), form)
        steps = shard.grid_steps(job.version)
        if steps is None or job.grid is None:
            return (params,)
        return params, self._pack(job.grid, steps)

    def _encode_fixed(self, key: int, shard: ShardWorker, version: int, base: int | None) -> TensorRef:
        assert self._place is not None
        start = time.monotonic()
        bits = p12.fixed_bits(self._place.config)
        before = None if base is None else shard.params(base)
        buffer = p12.encode(shard.params(version), before, -1 if base is None else base, bits, self._threads)
        self._codec_s += time.monotonic() - start
        ref = TensorRef(key, (shard.end - shard.begin,), "p12", len(buffer))
        self._made.append((ref, buffer))
        return ref

    def _drop_versions(self, job: jobs.DropVersions, _: Buffers) -> None:
        self._here[1].drop_below(job.version, job.closed)

    # ---- disk ----

    def _about(self, version: int) -> dict[str, Any]:
        """What a file of this shard says of itself; a file that says otherwise is refused."""
        place, shard = self._here
        count = len(place.plan.stages[place.stage].servers)
        return about_part(place.config.config_hash().hex(), shard.layout, place.stage, place.shard, count, version)

    def _restore(self, path: Path, version: int) -> bytes:
        place, shard = self._here
        state = checkpoint.read_part(path, self._about(version), place.config)
        if not set(STATE) <= set(state) <= set(UNITS):
            raise checkpoint.CheckpointError(f"{path}: holds {sorted(state)} instead of params, m and v")
        return shard.load(version, **state)

    def _load_snapshot(self, job: jobs.LoadSnapshot, _: Buffers) -> bytes:
        return self._restore(self._state / job.file, job.version)

    def _write_snapshot(self, job: jobs.WriteSnapshot, _: Buffers) -> str:
        _place, shard = self._here
        path = self._state / f"snapshot-{job.version:08d}.safetensors"
        checkpoint.write_part(path, shard.snapshot(job.version), self._about(job.version))
        return path.name

    @property
    def _checkpoints(self) -> Place:
        """Where they are read."""
        place, _ = self._here
        return checkpoint.run_folder(place_of(self._state, place.config), place.config)

    @property
    def _outgoing(self) -> Path:
        """Where they are written: what an object store is to have is brought from there by another lane."""
        place, _ = self._here
        if place.config.checkpoint.is_url:
            return outgoing(self._state, place.config)
        return checkpoint.run_folder(self._state / place.config.checkpoint.folder, place.config)

    @property
    def _shared(self) -> bool:
        place, _ = self._here
        return place.config.checkpoint.shared

    def _write_checkpoint(self, job: jobs.WriteCheckpoint, _: Buffers) -> tuple[str, int, bytes]:
        place, shard = self._here
        home = checkpoint.step_folder(self._outgoing, job.step)
        state = shard.snapshot(job.version)
        part = checkpoint.write_checkpoint_part(
            home, place.stage, place.shard, state, self._about(job.version), alone=not self._shared
        )
        if self._sealer is not None:
            seals.seal_part(home, part, place.config.config_hash().hex(), job.step, self._sealer)
        if place.config.checkpoint.is_url:
            forget_outgoing(self._outgoing)
        elif not self._shared:
            checkpoint.delete_older_parts(self._outgoing, job.step, place.config, job.complete)
        return part.file, part.byte_count, part.digest

    def _write_manifest(self, job: jobs.WriteManifest, _: Buffers) -> str:
        place, _shard = self._here
        if self._data is None:
            raise RuntimeError("only a server of stage 0 writes manifests")
        manifest = checkpoint.Manifest(
            run=place.config.name,
            config_hash=place.config.config_hash().hex(),
            config=place.config,
            step=job.step,
            version=job.step,
            data_cursor=job.data_cursor,
            data_hash=self._data.describe().data_hash,
            vocabulary=place.vocabulary,
            partition=partition_of(place.plan),
            parts=tuple(checkpoint.PartEntry(*part) for part in job.parts),
        )
        here = self._shared and not place.config.checkpoint.is_url
        return checkpoint.write_manifest(self._outgoing, manifest, here, self._sign)

    def _write_evidence(self, job: jobs.WriteEvidence, buffers: Buffers) -> str:
        place, _shard = self._here
        return evidence.write(self._state / evidence.FOLDER, place, job, buffers, self._sealer)

    def _sign(self, home: Path, manifest: checkpoint.Manifest) -> None:
        if self._sealer is not None:
            seals.seal_manifest(home, manifest, self._sealer)

    def _load_checkpoint(self, job: jobs.StartShard) -> bytes:
        place, shard = self._here
        step = job.checkpoint_step
        home: Place = checkpoint.step_folder(self._checkpoints, step)
        if isinstance(home, Path) and not self._shared:
            return self._restore_own(home, step)
        manifest = checkpoint.read_manifest(home)
        checkpoint.check_run(manifest, place.config)
        recut = None
        parts = [part for part in manifest.parts if (part.stage, part.shard) == (place.stage, place.shard)]
        if manifest.partition != partition_of(place.plan):
            # Other servers have written it, who held the model otherwise: what is in this shard now lay in theirs.
            if manifest.vocabulary != place.vocabulary:
                raise checkpoint.CheckpointError(
                    f"{home}: a vocabulary of {manifest.vocabulary}, not {place.vocabulary}"
                )
            recut = Recut(manifest, shard.layout, place.shard, len(place.plan.stages[place.stage].servers))
            parts = list(recut.parts)

        def goes_on() -> None:
            self.deliver(Outcome(WorkGoesOn(job, 0.0)))

        names = seals.files_of(home, parts)
        try:
            with checkpoint.fetched(home, names, self._state / FETCHED, goes_on) as local:
                self._verify(local, manifest, parts)
                if recut is not None:
                    digest = shard.load(manifest.version, **recut.read(local))
                else:
                    digest = self._restore(checkpoint.find_part(local, place.stage, place.shard), step)
        except checkpoint.CheckpointError as error:
            # That a store is away says nothing of what lies there; a bad sector of a disk does, and looks the same as
            # a mount that is away for a while: doubted once too often, a part is read once more at the next look.
            if isinstance(home, Path) or not isinstance(error.__cause__, OSError):
                doubt(self._state, home, [part.file for part in parts])
            raise
        trust(self._state, home, [part.file for part in parts])
        return digest

    def _restore_own(self, home: Path, step: int) -> bytes:
        """From a folder of this server's own, where mostly no manifest says what the part must be."""
        place, _ = self._here
        part = checkpoint.find_part(home, place.stage, place.shard)
        try:
            checkpoint.verify_own(part)
            digest = self._restore(part, step)
        except checkpoint.CheckpointError:
            doubt(self._state, home, [part.name])
            raise
        trust(self._state, home, [part.name])
        return digest

    def _verify(self, home: Path, manifest: checkpoint.Manifest, parts: Sequence[checkpoint.PartEntry]) -> None:
        vouched = seals.verify(home, manifest, parts)
        if self._sealer is not None and vouched.of_another(self._sealer.coordinator_key):
            raise checkpoint.CheckpointError(f"{home}: {vouched.sentence(self._sealer.coordinator_key)}")

    def _find_checkpoints(self, job: jobs.FindCheckpoints, _: Buffers) -> tuple[int, ...]:
        run = checkpoint.run_folder(soon(place_of(self._state, job.config)), job.config)
        if self._allowed.may_write(job.config):
            on(run).try_writing()
        return seals.present_checkpoints(run, doubted(self._state)) + checkpoint.own_parts(run, job.told, self._place)

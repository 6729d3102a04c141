"""A file of evidence stands for itself: computed again it shows the same, and a change of it is found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from node.commands.audit import audit
from node.compute import evidence
from node.compute.evidence import FOLDER
from node.machine import jobs
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.base.machine import Computed, ComputeFailed
from protocol.messages import Audit
from protocol.run.audits import AUDIT_SLICE, Difference
from tests.node.compute.test_lanes import Bench, small_run
from tests.node.compute.test_seals import SERVERS

LIAR = SERVERS[1].node
TASKS = tuple(TaskId(0, 0, 1 + (op == "L"), op) for op in ("L", "B"))


def written(folder: Path, claimed_of: int, gradients: str = "gi") -> tuple[Path, float]:
    """Evidence of a contribution with the route's end of microbatch 0, whose sum is that of another microbatch; and by
    how much it differs."""
    bench = Bench(small_run(1, gradients=gradients), folder)
    bench.start()
    bench.fetch(0)
    first, last = bench.devices

    def end(microbatch: int, accumulator: int) -> tuple[TensorRef, TensorRef, TensorRef, float, tuple[TensorRef, ...]]:
        tokens, labels = bench.do(bench.servers[0][0], jobs.LoadBatch(0, microbatch, bench.fresh(), bench.fresh()))
        x = bench.do(first, jobs.Forward(TaskId(0, microbatch, 0, "F"), 0, tokens, bench.fresh()))
        tasks = tuple(TaskId(0, microbatch, 1 + (op == "L"), op, 0, AUDIT_SLICE) for op in ("F", "L", "B"))
        loss, gradient = bench.do(last, jobs.RouteEnd(tasks, 0, x, labels, bench.fresh(), accumulator))
        parts = bench.do(last, jobs.TakeGradient(accumulator, (bench.fresh(), bench.fresh())))
        return x, labels, gradient, loss, parts

    x, labels, gradient, loss, honest = end(0, 7)
    claimed = end(claimed_of, 8)[4]
    value = bench.do(last, jobs.Compare(7, 0, honest, claimed))
    grid = bench.fresh() if gradients == "gi" else None
    weights = bench.do(last, jobs.TakeWeights(0, bench.fresh(), grid))
    named = dict(zip(("weights", "grid"), weights, strict=False))
    named |= {"input 0": x, "labels 0": labels, "input_gradient 0": gradient}
    named |= {"part 0": claimed[0], "part 1": claimed[1]}
    order = Audit(
        ledger_generation=1,
        contribution=ContributionId(LIAR, 1, 2),
        step=0,
        version=0,
        tasks=TASKS,
        losses=(loss,),
        auditor=NodeId(SERVERS[0].node),
        attempt=2,
    )
    found = Difference(claim="gradient", node=LIAR, task=TASKS[0], value=max(value, 0.5))
    job = jobs.WriteEvidence(order, (found,), tuple(named), tuple(named.values()))
    before = set((folder / "10").rglob("*"))
    fact = bench.servers[1][0].perform(job, {ref.key: bench.store.get(ref.key) for ref in job.tensors}).fact
    if isinstance(fact, ComputeFailed):
        assert set((folder / "10").rglob("*")) - before <= {folder / "10" / FOLDER}, "nothing is left of it"
        raise evidence.NoRoomError(fact.reason)
    assert isinstance(fact, Computed)
    return folder / "10" / FOLDER / fact.result, value


def verify(path: Path, *words: str) -> Result:
    return CliRunner().invoke(audit, ["verify", str(path), *words])


@pytest.mark.parametrize("gradients", ["gi", "fp64"])
def test_what_was_found_is_found_again(tmp_path: Path, gradients: str) -> None:
    """By the file alone, to the last digit that is shown; and it says which server signed it."""
    path, value = written(tmp_path, claimed_of=1, gradients=gradients)
    done = verify(path)
    assert done.exit_code == 0, done.output
    assert f"signed by server {SERVERS[0].node}" in done.output
    shown = max(value, 0.5)
    assert f"gradient of 0:L0@2 by {LIAR}: off by {shown:.3g} in the audit, {value:.3g} here: confirmed" in done.output


def test_what_was_not_false_is_not_confirmed(tmp_path: Path) -> None:
    """A server that accuses an honest member is found out by whoever checks."""
    path, value = written(tmp_path, claimed_of=0)
    done = verify(path)
    assert value == 0.0 and done.exit_code == 1 and "NOT confirmed" in done.output


def test_a_changed_file_is_no_evidence(tmp_path: Path) -> None:
    """One byte of it, another coordinator's, or something else altogether: a sentence, and 2."""
    path, _ = written(tmp_path, claimed_of=1)
    assert verify(path, "--coordinator", str(SERVERS[1].node)).exit_code == 2
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = verify(path)
    assert done.exit_code == 2 and "was changed" in done.output
    path.write_bytes(b"nothing")
    done = verify(path)
    assert done.exit_code == 2 and "no evidence of an audit" in done.output


def full(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    """A disk of this size."""
    usage = SimpleNamespace(total=total, used=total - free, free=free)
    monkeypatch.setattr("node.compute.evidence.shutil.disk_usage", lambda folder: usage)


@pytest.mark.slow
@pytest.mark.parametrize(("total", "free", "left"), [(20, 5, "5.0"), (500, 49, "50.0")])
def test_evidence_leaves_the_journal_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, left: str
) -> None:
    """The larger of 5 GB and a tenth of the disk: a server whose journal cannot be written ends."""
    full(monkeypatch, total * 10**9, free * 10**9)
    with pytest.raises(evidence.NoRoomError, match=rf"has {free}\.0 GB free, of which {left} are left for the journal"):
        written(tmp_path, claimed_of=1)
    full(monkeypatch, total * 10**9, (free + 2) * 10**9)
    assert written(tmp_path, claimed_of=1)[0].exists()


@pytest.mark.slow
def test_liars_with_many_names_fill_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many files and so many bytes, of which the oldest stay: each that was named is there until it is taken away,
    and what a killed writer left does not count."""
    folder = tmp_path / "10" / FOLDER
    folder.mkdir(parents=True)
    (folder / "x.safetensors.0011223344556677.tmp").write_bytes(bytes(2000))
    oldest = folder / "oldest.safetensors"
    oldest.write_bytes(bytes(1000))
    monkeypatch.setattr(evidence, "FOLDER_BYTES_MAX", 1 << 20)
    with pytest.raises(evidence.NoRoomError, match=r"with it there would be .* GB, and 0\.0 are kept; move what lies"):
        written(tmp_path, claimed_of=1)
    monkeypatch.setattr(evidence, "FOLDER_BYTES_MAX", 1 << 30)
    monkeypatch.setattr(evidence, "FILES_MAX", 1)
    with pytest.raises(evidence.NoRoomError, match="there are 1 files"):
        written(tmp_path, claimed_of=1)
    assert [path.name for path in folder.iterdir()] == [oldest.name]
    oldest.unlink()
    assert written(tmp_path, claimed_of=1)[0].exists()

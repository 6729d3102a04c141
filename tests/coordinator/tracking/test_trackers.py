"""Trackers get every step that counts, once, whatever dies; and each one's own library reads what was written."""

from __future__ import annotations

import csv
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from coordinator.live.records import StepRow
from coordinator.process import tracking
from coordinator.process.tracking import History, Places, track
from coordinator.tracking.feed import Place, Segments, flat, row_for_trackers
from coordinator.tracking.trackers import About, Row, Target, open_tracker, parse_target
from protocol.base.errors import BadInputError
from protocol.messages import ValidationLoss
from protocol.run.batches import Batches
from protocol.run.run import RunConfig

CONFIG = RunConfig(name="tracked")
BATCHES = Batches.of(CONFIG)


def row(step: int, generation: int = 1, loss: float | None = None, *validations: ValidationLoss) -> StepRow:
    return StepRow(
        ledger_generation=generation, step=step, loss=5.0 - step / 8 if loss is None else loss, tokens=2048,
        gradient_norm=0.25, clip_factor=1.0, skipped=False, learning_rate=1e-3, duration_s=0.5, wall_s=1e9 + step,
        validations=validations,
    )  # fmt: skip


def about(folder: Path, first: int = 0) -> About:
    return About(run="tracked", run_id="ab" * 16, folder=str(folder), first=first, config=flat(CONFIG))


def rows_with_a_validation() -> list[Row]:
    found = ValidationLoss(version=1, loss=2.0, tokens=64)
    return [row_for_trackers(each, BATCHES) for each in (row(0), row(1), row(2, 1, math.nan, found), row(3))]


def write(kind: str, folder: Path) -> None:
    """Four steps; then the run goes back to step 2, and two come again, by another start."""
    tracker = open_tracker(kind, about(folder))
    tracker.log(rows_with_a_validation())
    tracker.close()
    again = open_tracker(kind, about(folder, first=2))
    again.log([row_for_trackers(row(step, 2, 1.5), BATCHES) for step in (2, 3)])
    again.close()


def library(name: str) -> Any:
    """Loudly: without its library a tracker is not tried."""
    return pytest.importorskip(name, reason=f"NOT TRIED: {name} is not installed (pip install 'barnraise[trackers]')")


def test_a_csv_file_holds_each_step_once(tmp_path: Path) -> None:
    """What comes again replaces what was there; half a line that a power cut left goes."""
    write("csv", tmp_path)
    path = tmp_path / "tracked.csv"
    with path.open("a") as file:
        file.write("4,10000000")
    open_tracker("csv", about(tmp_path, first=4)).close()
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["step"], line["loss"]) for line in lines] == [
        ("0", "5.0"),
        ("1", "4.875"),
        ("2", "1.5"),
        ("3", "1.5"),
    ]
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("left", ["step,wall", "\0" * 64, ""], ids=["half", "zeros", "nothing"])
def test_a_csv_file_of_which_a_power_cut_left_no_first_line_begins_anew(tmp_path: Path, left: str) -> None:
    """Rows behind half of the columns' names would have no names."""
    (tmp_path / "tracked.csv").write_text(left)
    tracker = open_tracker("csv", about(tmp_path))
    tracker.log([row_for_trackers(row(0), BATCHES)])
    tracker.close()
    with (tmp_path / "tracked.csv").open(newline="") as file:
        assert [(line["step"], line["loss"]) for line in csv.DictReader(file)] == [("0", "5.0")]


def test_what_a_power_cut_left_of_the_places_is_no_reason_not_to_start(tmp_path: Path) -> None:
    """Whatever bytes they are: each tracker begins anew, which its files can bear."""
    target = Target("csv", tmp_path)
    for left in (b'{"csv:\xff": {"next": 5}}', b"\0" * 64, b"", b"[]"):
        (tmp_path / "trackers.json").write_bytes(left)
        assert Places(tmp_path).of(target) == Place()


def test_a_csv_file_names_the_validation(tmp_path: Path) -> None:
    tracker = open_tracker("csv", about(tmp_path))
    tracker.log(rows_with_a_validation())
    tracker.close()
    with (tmp_path / "tracked.csv").open(newline="") as file:
        line = list(csv.DictReader(file))[2]
    assert (line["loss"], line["validation_version"], line["validation_loss"]) == ("inf", "1", "2.0")
    assert float(line["validation_perplexity"]) == pytest.approx(math.e**2)


def tensorboard_shows(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tracked"))
    read.Reload()
    return [(event.step, round(event.value, 4)) for event in read.Scalars(tag)]


def test_tensorboard_reads_its_events(tmp_path: Path) -> None:
    library("tensorboard")
    write("tensorboard", tmp_path)
    assert tensorboard_shows(tmp_path, "train/loss") == [(0, 5.0), (1, 4.875), (2, 1.5), (3, 1.5)]
    assert tensorboard_shows(tmp_path, "validation/loss") == [(1, 2.0)]


def test_tensorboard_forgets_all_of_a_run_that_goes_back_to_its_beginning(tmp_path: Path) -> None:
    """Step 0 voids what was there as any other does: no curve runs twice over the same steps."""
    library("tensorboard")
    write("tensorboard", tmp_path)
    again = open_tracker("tensorboard", about(tmp_path))
    again.log([row_for_trackers(row(step, 3, 1.25), BATCHES) for step in (0, 1)])
    again.close()
    assert tensorboard_shows(tmp_path, "train/loss") == [(0, 1.25), (1, 1.25)]


def test_tensorboard_keeps_the_last_validation_of_a_run_that_is_over(tmp_path: Path) -> None:
    """It is of the version behind the last step, where a tracker that is opened once more would begin."""
    library("tensorboard")
    tracker = open_tracker("tensorboard", about(tmp_path))
    last = ValidationLoss(version=2, loss=2.0, tokens=64)
    tracker.log([row_for_trackers(each, BATCHES) for each in (row(0), row(1, 1, 1.0, last))])
    tracker.close()
    open_tracker("tensorboard", about(tmp_path, first=2)).close()
    assert tensorboard_shows(tmp_path, "validation/loss") == [(2, 2.0)]


def test_wandb_reads_its_offline_runs(tmp_path: Path) -> None:
    """Its file is a log of LevelDB's form with its own messages; the library parses those."""
    library("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    write("wandb", tmp_path)
    found = []
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "train/loss" in items:
                found.append((int(items["step"]), items["train/loss"]))
    assert sorted(found) == [(0, "5"), (1, "4.875"), (2, "1.5"), (2, "Infinity"), (3, "1.5"), (3, "4.625")]


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log behind a head of 7 bytes: blocks of 32 KiB, pieces of CRC, length and kind."""
    assert content[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("default")
def test_mlflow_reads_its_store(tmp_path: Path) -> None:
    library("mlflow")
    from mlflow.tracking import MlflowClient

    write("mlflow", tmp_path)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "tracked"]
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    histories = [client.get_metric_history(each.info.run_id, "train.loss") for each in runs]
    assert [[metric.step for metric in history] for history in histories] == [[0, 1, 2, 3], [2, 3]]
    assert runs[0].data.params["optimizer.learning_rate"] == "0.0015"


def test_steps_of_other_ledgers_come_again() -> None:
    """Before the first of them has closed nothing is known to be wrong; from then on all behind it is."""
    place = Place().after([row(step) for step in range(10)])
    assert place.where_it_holds(((0, 1),)) == place
    assert place.where_it_holds(((0, 1), (4, 2))) == Place(next=4, segments=((0, 1),))
    later = Place(next=4, segments=((0, 1),)).after([row(4, 2), row(5, 2)])
    assert later.segments == ((0, 1), (4, 2)) and later.where_it_holds(((0, 1), (4, 2))) == later
    assert later.where_it_holds(((0, 1), (2, 3))) == Place(next=2, segments=((0, 1),))
    assert later.where_it_holds(()) == Place(next=0)


@pytest.mark.parametrize("text", ["csv", "csv:", "excel:/tmp/x", ":/tmp"])
def test_a_tracker_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="KIND:FOLDER"):
        parse_target(text)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, with what to install."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"needs the library wandb: pip install 'barnraise\[trackers\]'"):
        parse_target("wandb:/tmp/x")


def test_a_tracker_hears_no_secret_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library is somebody else's, and may write its surroundings down."""
    monkeypatch.setenv("BARNRAISE_STORE", "postgresql://me:pa55word@host/runs")
    monkeypatch.setenv("LANG", "C.UTF-8")
    environment = tracking._environment()
    assert "pa55word" not in str(environment) and environment["LANG"] == "C.UTF-8"
    assert environment["WANDB_MODE"] == "offline"


@pytest.mark.slow
@pytest.mark.trio
async def test_a_run_is_followed_over_kills_and_going_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracker's process is real: it is killed, the coordinator starts again, the run goes back; the file has every
    step that counts once."""
    monkeypatch.setattr(tracking, "LOOK_S", 0.05)
    rows = {step: row(step) for step in range(4)}

    async def steps(first: int, most: int) -> Sequence[StepRow]:
        return [rows[step] for step in sorted(rows) if step >= first][:most]

    async def segments() -> Segments:
        first = dict[int, int]()
        for step in sorted(rows):
            first.setdefault(rows[step].ledger_generation, step)
        return tuple((step, generation) for generation, step in first.items())

    def told() -> list[tuple[str, str]]:
        path = tmp_path / "csv" / "tracked.csv"
        lines = list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []
        return [(line["step"], line["loss"]) for line in lines]

    async def follow_until(expected: list[tuple[str, str]]) -> None:
        async with trio.open_nursery() as nursery:
            target, places = Target("csv", tmp_path / "csv"), Places(tmp_path)
            nursery.start_soon(track, target, CONFIG, "ab" * 16, History(steps, segments, lambda: BATCHES), places)
            with trio.fail_after(30):
                while told() != expected:
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()

    await follow_until([(str(step), str(rows[step].loss)) for step in range(4)])
    rows |= {4: row(4)}
    await follow_until([(str(step), str(rows[step].loss)) for step in range(5)])
    rows = {step: msgspec.structs.replace(each) for step, each in rows.items() if step < 2} | {2: row(2, 2, 1.25)}
    await follow_until([("0", "5.0"), ("1", "4.875"), ("2", "1.25")])

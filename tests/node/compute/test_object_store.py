"""Checkpoints in an object store: what is promised of a folder holds in obstore's local and in-memory stores, too."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from node.compute import checkpoint, object_store, seals
from node.compute.checkpoint import MANIFEST, CheckpointError, Manifest, PartEntry
from node.compute.object_store import Patience, StoreError, StoreFiles, StorePlace, TooLargeError
from node.compute.places import Folder, Place, on, open_place
from node.compute.store_lane import Door, StorePerformer, bring_part, outgoing
from node.data.allowed import Allowed
from node.machine.jobs import BringManifest, BringPart, TryStore
from protocol.base.errors import BadInputError
from protocol.base.machine import Computed, ComputeFailed
from protocol.run.run import RunConfig
from tests.node.compute.test_checkpoint import CONFIG, SHARDS, about, manifest
from tests.node.compute.test_seals import COORDINATOR, SERVERS, sealer
from tests.node.compute.whole_checkpoint import read_checkpoint

SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAPLANTED12345", "AWS_SECRET_ACCESS_KEY": "planted/secret+key", "AWS_REGION": "x-1"}


@pytest.fixture(params=["memory", "file", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place of each kind that can be had here, with nothing in it."""
    kinds = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}/store", "folder": str(tmp_path / "f")}
    return open_place(kinds[request.param])


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((5,), value) for name in ("params", "m", "v")}


def bring(place: Place, step: int, scratch: Path, value: float | None = None) -> tuple[PartEntry, ...]:
    """Three small parts of a checkpoint, signed, as three servers bring them."""
    here = checkpoint.step_folder(scratch, step)
    parts = []
    for server, (stage, shard) in zip(SERVERS, SHARDS, strict=True):
        state = state_of(float(step + shard) if value is None else value)
        part = checkpoint.write_checkpoint_part(here, stage, shard, state, about(step))
        seals.seal_part(here, part, CONFIG.config_hash().hex(), step, sealer(server))
        bring_part(here, checkpoint.step_folder(place, step), part)
        parts.append(part)
    return tuple(parts)


def sign(home: Any, written: Manifest) -> None:
    seals.seal_manifest(home, written, sealer(SERVERS[0]))


def write(place: Place, step: int, scratch: Path, value: float | None = None) -> Place:
    checkpoint.write_manifest(place, manifest(step, bring(place, step, scratch, value)), True, sign)
    return checkpoint.step_folder(place, step)


def contents(home: Place) -> dict[str, bytes]:
    return {name: on(home).read(name, 1 << 20) for name in on(home).sizes()}


# ---- what a place promises -------------------------------------------------------------------------------------------


def test_a_place_is_read_as_it_was_written(place: Place, tmp_path: Path) -> None:
    """Small files, large ones in pieces, names, and nothing where nothing is."""
    home = place / "run" / "step-00000001"
    assert on(home).sizes() == {} and on(place).below() == [] and not on(home).exists()
    assert on(place / "run").below() == []
    big = bytes(range(256)) * (3 * object_store.PIECE_BYTES // 256) + b"end"
    (tmp_path / "big").write_bytes(big)
    home_files = on(home)
    home_files.put("small", b"1")
    home_files.put("small", b"22")
    home_files.keep(tmp_path / "big", "large")
    assert home_files.sizes() == {"small": 2, "large": len(big)} and on(place).below() == ["run"]
    assert on(place / "run").below() == ["step-00000001"] and on(place / "run").exists()
    home_files.fetch("large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == big
    (tmp_path / "again").write_bytes(big)
    assert home_files.digest("large") == Folder(tmp_path).digest("again")
    with pytest.raises(TooLargeError):
        home_files.read("large", 100)
    for name in ("none", "small/none"):
        with pytest.raises(OSError, match=r"No such file|Not a directory"):
            home_files.read(name, 100)
    home_files.rename("small", "other")
    with pytest.raises(FileNotFoundError):
        home_files.rename("small", "other")
    home_files.remove(["large", "none"])
    assert home_files.sizes() == {"other": 2}
    home_files.try_writing()
    home_files.remove_all()
    assert home_files.sizes() == {}


def test_of_two_who_add_a_name_one_succeeds(place: Place) -> None:
    """And what is swapped must be what was seen, but where nobody can look and write at once."""
    files = on(place / "run")
    assert files.add(MANIFEST, b"one") and not files.add(MANIFEST, b"two")
    assert files.read(MANIFEST, 9) == b"one"
    if "memory" in str(place):
        assert not files.swap(MANIFEST, b"three", b"not seen") and files.read(MANIFEST, 9) == b"one"
    assert files.swap(MANIFEST, b"three", b"one") and files.read(MANIFEST, 9) == b"three"


def test_a_lost_answer_is_no_other_writer(tmp_path: Path) -> None:
    """What was put, and is put again because nobody heard that it was, is there once and ours."""
    files = on(open_place(f"memory://{tmp_path.name}") / "run")
    assert files.add(MANIFEST, b"ours") and files.add(MANIFEST, b"ours") and not files.add(MANIFEST, b"theirs")


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_read_kept_and_undone_as_in_a_folder(place: Place, tmp_path: Path) -> None:
    """The rules do not depend on where it lies: what is kept, what a seal says, what a run undoes."""
    for step in (100, 200, 300):
        write(place, step, tmp_path / "mine")
    assert checkpoint.scan_checkpoints(place)[0] == checkpoint.present_checkpoints(place) == (300, 200)
    assert on(place).below() == ["step-00000200", "step-00000300"], "no empty folder is left"
    home = checkpoint.step_folder(place, 300)
    found, shards = read_checkpoint(place, 300)
    assert list(shards) == list(SHARDS) and torch.equal(shards[0, 1]["params"], torch.full((5,), 301.0))
    vouched = seals.verify(home, found, found.parts)
    assert vouched.manifest is not None and vouched.manifest.node == SERVERS[0].node and len(vouched.servers) == 3
    assert vouched.sentence(COORDINATOR.public_key) == ""
    before = contents(home)
    write(place, 300, tmp_path / "mine")
    assert contents(home) == before, "what verifies is not touched again"
    checkpoint.undo_after(place, 200)
    checkpoint.undo_after(place, 200)
    assert checkpoint.scan_checkpoints(place)[0] == (200,)
    write(place, 300, tmp_path / "other", 7.5)
    assert checkpoint.scan_checkpoints(place)[0] == (300, 200)
    assert set(found.parts).isdisjoint(checkpoint.read_manifest(home).parts)
    assert not {part.file for part in found.parts} & set(on(home).sizes()), "the old ones are gone"


@pytest.mark.parametrize("until", ["nothing", "a part", "all parts", "the manifest's seal"])
def test_what_was_interrupted_is_no_checkpoint(place: Place, tmp_path: Path, until: str) -> None:
    """A server that ends between two writes: the one before counts; the next write of the same step completes it."""

    class CutShortError(Exception):
        pass

    write(place, 100, tmp_path / "mine")
    if until != "nothing":
        parts = bring(place, 200, tmp_path / "mine")
        if until == "a part":
            on(checkpoint.step_folder(place, 200)).remove(part.file for part in parts[1:])

        def interrupt(home: Any, written: Manifest) -> None:
            if until == "the manifest's seal":
                sign(home, written)
            raise CutShortError

        with pytest.raises(CheckpointError if until == "a part" else CutShortError):
            checkpoint.write_manifest(place, manifest(200, parts), True, interrupt)
    assert checkpoint.scan_checkpoints(place)[0] == checkpoint.present_checkpoints(place) == (100,)
    write(place, 200, tmp_path / "mine")
    assert checkpoint.scan_checkpoints(place)[0] == (200, 100)


def test_a_damaged_part_is_named_with_its_server_and_mended_by_the_next_write(place: Place, tmp_path: Path) -> None:
    """One bit, the length as before: a quick look does not see it, whoever reads the part does."""
    home = write(place, 100, tmp_path / "mine")
    part = checkpoint.read_manifest(home).parts[1]
    data = bytearray(on(home).read(part.file, 1 << 20))
    data[-3] ^= 1
    on(home).put(part.file, bytes(data))
    complete, bad = seals.scan_checkpoints(place)
    assert complete == () and f"{home / part.file} is damaged" in bad[0] and SERVERS[1].node in bad[0]
    with pytest.raises(CheckpointError, match=f"{home / part.file} is damaged"):
        read_checkpoint(place, 100)
    write(place, 100, tmp_path / "mine")
    assert seals.scan_checkpoints(place) == ((100,), ())


@pytest.mark.parametrize("harm", ["torn", "other sum"])
def test_a_damaged_manifest_is_named_and_written_anew(place: Place, tmp_path: Path, harm: str) -> None:
    """It is replaced by who has seen exactly that."""
    home = write(place, 100, tmp_path / "mine")
    content = on(home).read(MANIFEST, 1 << 20)
    bad = content[:-40] if harm == "torn" else content.replace(b'"step": 100', b'"step": 101')
    on(home).put(MANIFEST, bad)
    with pytest.raises(CheckpointError, match=r"manifest\.json is (torn or )?damaged"):
        checkpoint.read_manifest(home)
    write(place, 100, tmp_path / "mine")
    assert seals.scan_checkpoints(place) == ((100,), ()) and on(home).read(MANIFEST, 1 << 20) == content


# ---- two writers -----------------------------------------------------------------------------------------------------


def race(place: Place, scratch: Path) -> tuple[bytes, bytes]:
    """Two servers make the same step complete, of parts that came out otherwise. Both have seen that no manifest is
    there before either writes one. Returns the manifest after the first, and after the second."""
    first, second = (bring(place, 100, scratch / str(value), value) for value in (1.0, 2.0))
    home = checkpoint.step_folder(place, 100)
    after_first: list[bytes] = []

    def others_come_first(there: Any, written: Manifest) -> None:
        sign(there, written)
        checkpoint.write_manifest(place, manifest(100, first), True, sign)
        after_first.append(on(home).read(MANIFEST, 1 << 20))

    checkpoint.write_manifest(place, manifest(100, second), True, others_come_first)
    return after_first[0], on(home).read(MANIFEST, 1 << 20)


def test_of_two_who_write_one_manifest_one_wins_and_the_other_agrees(place: Place, tmp_path: Path) -> None:
    """What the first wrote may have been read already: it stays, byte for byte, with its parts and its seal."""
    before, after = race(place, tmp_path)
    assert before == after
    assert seals.scan_checkpoints(place) == ((100,), ())
    home = checkpoint.step_folder(place, 100)
    found = checkpoint.read_manifest(home)
    assert seals.verify(home, found, found.parts).manifest is not None
    assert len(on(home).sizes()) == 2 * len(SHARDS) + 2, "and nothing of the other is left"


def test_without_put_if_absent_a_manifest_that_counts_would_be_written_over(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same race where a manifest is put whatever is there: the first one's is gone. So the rule is what holds."""

    def whatever_is_there(self: Any, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True

    monkeypatch.setattr(StoreFiles, "add", whatever_is_there)
    monkeypatch.setattr(Folder, "add", whatever_is_there)
    try:
        before, after = race(place, tmp_path)
    except CheckpointError:  # the first has removed the parts of the second as those that nobody names
        before, after = b"", b"gone"
    assert before != after


def test_another_writer_of_what_cannot_be_is_refused(place: Place, tmp_path: Path) -> None:
    """The one that came first is of another run: a sentence, and nobody's files are taken for ours."""
    parts = bring(place, 100, tmp_path)
    home = checkpoint.step_folder(place, 100)
    other = msgspec.structs.replace(manifest(100, parts), config_hash="00", sum="")
    other = msgspec.structs.replace(other, sum=other.expected_sum())

    def stranger(there: Any, written: Manifest) -> None:
        assert on(home).add(MANIFEST, msgspec.json.encode(other))

    with pytest.raises(CheckpointError, match="another server writes it, too"):
        checkpoint.write_manifest(place, manifest(100, parts), True, stranger)
    assert checkpoint.read_manifest(home).config_hash == "00"


# ---- stores that fail ------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where somebody answers the telephone and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield listener.getsockname()[1]


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers every request with an error that repeats what was sent, keys and all."""

    status = 403

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        self.rfile.read(length)
        body = f"<Error><Code>NotAtAll</Code>{self.path} {self.headers} {SECRETS}</Error>".encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_HEAD = do_DELETE = do_POST = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Not on a test's terminal."""


@pytest.fixture(params=[403, 503])
def refusing(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port where a store refuses everything, in the words of `Refusing`."""
    handler = type("Handler", (Refusing,), {"status": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def remote(monkeypatch: pytest.MonkeyPatch, port: int, patience: Patience) -> StorePlace:
    """A bucket of a store at that port of this computer, by an operator's environment."""
    for name, value in {**SECRETS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
        monkeypatch.setenv(name, value)
    found = open_place(f"s3://bucket-{port}/prefix")
    assert isinstance(found, StorePlace)
    return found.with_patience(patience)


def all_that_fails(files: StoreFiles, scratch: Path) -> dict[str, Any]:
    (scratch / "part").write_bytes(b"x" * 100)
    return {
        "sizes": files.sizes,
        "exists": files.exists,
        "read": lambda: files.read("a", 10),
        "keep": lambda: files.keep(scratch / "part", "a"),
        "add": lambda: files.add("a", b"1"),
        "try": files.try_writing,
        "remove": lambda: files.remove(["a"]),
    }


@pytest.mark.slow
def test_a_store_that_hangs_is_an_error_in_time(silent: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is asked of it, within its patience and not before somebody would have answered."""
    files = remote(monkeypatch, silent, Patience(0.2, 0.3, 0.3)).files
    for name, ask in all_that_fails(files, tmp_path).items():
        begun = time.monotonic()
        with pytest.raises(StoreError):
            ask()
        assert 0.2 < time.monotonic() - begun < 10, name


@pytest.mark.slow
def test_a_store_that_refuses_is_an_error_without_a_secret(
    refusing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In no sentence, though the store repeats every header and key in its answer; nor in what a log would show."""
    files = remote(monkeypatch, refusing, Patience(0.5, 1.0, 0.3)).files
    for name, ask in all_that_fails(files, tmp_path).items():
        with pytest.raises(StoreError) as caught:
            ask()
        shown = str(caught.value) + repr(caught.value) + str(caught.value.__cause__)
        assert not any(value in shown for value in list(SECRETS.values())[:2]), (name, shown)
        assert "authorization" not in shown.lower() and "\n" not in str(caught.value), shown
        assert caught.value.__suppress_context__, "no traceback leads to the store's own words"


def test_a_secret_in_a_urls_query_is_cut_off() -> None:
    """As a shared access signature is."""
    error = RuntimeError("Error performing PUT https://a.b/c?sv=1&sig=PLANTED in 3ms - gone")
    assert object_store.sentence(error) == "Error performing PUT https://a.b/c in 3ms - gone"


def test_nobody_needs_obstore_who_uses_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it one sentence says what to install."""
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert open_place("/shared") == Path("/shared")
    with pytest.raises(BadInputError, match=r"one more package: pip install 'barnraise\[objects\]'"):
        open_place("s3://bucket/prefix", "--checkpoints")


# ---- the lane --------------------------------------------------------------------------------------------------------


def config_at(url: str) -> RunConfig:
    return msgspec.structs.replace(CONFIG, checkpoint=msgspec.structs.replace(CONFIG.checkpoint, folder=url))


def left_here(state: Path, config: RunConfig, step: int) -> BringPart:
    """A part that the other lane has left on the disk."""
    home = checkpoint.step_folder(outgoing(state, config), step)
    part = checkpoint.write_checkpoint_part(home, 0, 0, state_of(float(step)), about(step))
    return BringPart(config, 1, step, 0, 0, part.file, part.byte_count, part.digest)


def test_the_lane_brings_what_lies_here_and_forgets_it(tmp_path: Path) -> None:
    """Parts, then the manifest; of what was left out before nothing stays. Earlier ledgers bring no manifest."""
    url = f"memory://{tmp_path.name}"
    config, door = config_at(url), Door()
    lane = StorePerformer(tmp_path, Allowed(checkpoints=(url,)), door)
    left_here(tmp_path, config, 50)
    job = left_here(tmp_path, config, 100)
    assert isinstance(lane.perform(TryStore(config, 1), {}).fact, Computed)
    assert isinstance(lane.perform(job, {}).fact, Computed)
    assert not list(outgoing(tmp_path, config).iterdir())
    folder = checkpoint.run_folder(open_place(url), config)
    assert checkpoint.present_checkpoints(folder) == ()
    written = dataclasses.replace(PartEntry(0, 0, job.file, job.byte_count, job.digest))
    whole = msgspec.structs.replace(manifest(100, (written,)), config=config, config_hash=config.config_hash().hex())
    for generation, comes in ((1, False), (2, True)):
        checkpoint.write_manifest(outgoing(tmp_path, config), whole, False, sign)
        door.begin(2)
        fact = lane.perform(BringManifest(config, generation, 100), {}).fact
        assert isinstance(fact, Computed) == comes, fact
        assert checkpoint.present_checkpoints(folder) == ((100,) if comes else ())
    assert isinstance(fact, Computed) and fact.result == f"{url}/{folder.name}/step-00000100/{MANIFEST}"
    assert len(on(checkpoint.step_folder(folder, 100)).sizes()) == 3, "part, manifest, seal"
    again = lane.perform(BringManifest(config, 2, 100), {}).fact
    assert isinstance(again, Computed) and again.result == fact.result, "a part was announced twice"


def test_a_manifest_that_the_store_would_not_take_yet_waits_for_it(tmp_path: Path, silent: int) -> None:
    """The next checkpoint's part was brought meanwhile, and took the folder of the one before: a checkpoint whose parts
    all lay in the store never was one."""
    url = f"memory://{tmp_path.name}"
    config = config_at(url)
    lane = StorePerformer(tmp_path, Allowed(checkpoints=(url,)), Door())
    parts = {}
    for step in (50, 100, 150):
        job = left_here(tmp_path, config, step)
        parts[step] = PartEntry(0, 0, job.file, job.byte_count, job.digest)
        if step == 100:
            whole = msgspec.structs.replace(
                manifest(step, (parts[step],)), config=config, config_hash=config.config_hash().hex()
            )
            checkpoint.write_manifest(outgoing(tmp_path, config), whole, False, sign)
        assert isinstance(lane.perform(job, {}).fact, Computed)
    assert isinstance(lane.perform(BringManifest(config, 0, 100), {}).fact, Computed)
    folder = checkpoint.run_folder(open_place(url), config)
    assert checkpoint.present_checkpoints(folder) == (100,)
    assert not list(outgoing(tmp_path, config).iterdir())


def test_the_lane_writes_nowhere_without_leave_and_says_what_fails(
    tmp_path: Path, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's word, and then the store's; what was to be brought stays here for another try."""
    config = config_at("memory://theirs")
    lane = StorePerformer(tmp_path, Allowed(checkpoints=("memory://ours",)), Door())
    fact = lane.perform(TryStore(config, 1), {}).fact
    assert isinstance(fact, ComputeFailed) and "say so with `--checkpoints memory://theirs`" in fact.reason
    place = remote(monkeypatch, silent, Patience(0.2, 0.3, 0.3))
    monkeypatch.setattr("node.compute.store_lane.place_of", lambda state, config: place)
    config = config_at(str(place))
    job = left_here(tmp_path, config, 100)
    fact = StorePerformer(tmp_path, Allowed(checkpoints=(str(place),)), Door()).perform(job, {}).fact
    assert isinstance(fact, ComputeFailed) and fact.reason.startswith(str(place))
    assert (checkpoint.step_folder(outgoing(tmp_path, config), 100) / job.file).exists()

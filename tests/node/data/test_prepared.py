"""Tests of `node.data.prepared`, `rows` and `mixture`, and of `barnraise data`."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from node.commands.data import data as command
from node.data import prepared
from node.data.allowed import Allowed, named_paths
from node.data.dataset import Dataset
from node.data.mixture import Turns, shares
from node.data.prepared import PreparedFolder, prepare
from node.data.rows import FileRow, Tokens
from protocol.base.errors import BadInputError
from protocol.cli import main
from protocol.run.mixture import MIXTURE_TURN as TURN
from protocol.run.run import BatchSection, DataSection, ModelSection, RunConfig

CONTEXT = 8


def run(source: Path, tokenizer: str = "prepared", mixture: str = "", seed: int = 1) -> RunConfig:
    return RunConfig(
        seed=seed,
        model=ModelSection(context=CONTEXT),
        data=DataSection(source=str(source), tokenizer=tokenizer, mixture=mixture),
        batch=BatchSection(microbatches=3, samples=2),
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two sources: numbers as text, and letters as jsonl with 40 documents."""
    (tmp_path / "numbers.txt").write_text(" ".join(f"{number:04d}" for number in range(900)), encoding="utf-8")
    lines = [json.dumps({"text": chr(97 + number % 26) * 50}) for number in range(40)]
    (tmp_path / "letters.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_prepared_source_trains_as_the_source_itself(
    texts: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch, the validation, the vocabulary and the hash are the same, also across the files' edges."""
    monkeypatch.setattr(prepared, "FILE_TOKENS", 97)
    source = texts / "numbers.txt"
    prepare([("numbers", str(source))], "text", tokenizer, texts / "out")
    one, two = Dataset(run(source, tokenizer)), Dataset(run(texts / "out"))
    assert one.describe().data_hash == two.describe().data_hash
    assert one.describe().token_count == two.describe().token_count > 97 * 3
    assert one.vocabulary == two.vocabulary
    for step in range(40):
        for microbatch in range(3):
            for expected, got in zip(one.batch(step, microbatch), two.batch(step, microbatch), strict=True):
                assert got.dtype == np.int32 and np.array_equal(expected, got)
    assert np.array_equal(one.validation_batch(0)[1], two.validation_batch(0)[1])


def test_documents_keep_their_boundaries(texts: Path) -> None:
    """Each document can be asked for by its number, and ends with the mark."""
    prepare(
        [("letters", str(texts / "letters.jsonl")), ("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "o"
    )
    folder = PreparedFolder.open(str(texts / "o"))
    assert [(part.name, part.documents) for part in folder.about.parts] == [("letters", 40), ("n", 1)]
    for number in (0, 1, 39):
        tokens = folder.document(0, number)
        assert folder.tokenizer.decode(tokens) == chr(97 + number % 26) * 50
        assert tokens[-1] == folder.tokenizer.end_mark
    with pytest.raises(BadInputError, match="--document"):
        folder.document(0, 40)
    folder.check()


def test_a_mixture_draws_each_part_by_its_weight(texts: Path) -> None:
    """Within a turn the shares are exact; each part goes through its own epochs; another seed, another order."""
    sources = [("letters", str(texts / "letters.jsonl")), ("numbers", str(texts / "numbers.txt"))]
    prepare(sources, "text", "bytes", texts / "out")
    dataset = Dataset(run(texts / "out", mixture="numbers=3 letters=1"))
    rows = [row for step in range(TURN // 6) for b in range(3) for row in dataset.batch(step, b)[0]]
    numbers = [row.tobytes() for row in rows if (row < 97).all()]
    assert len(numbers) / len(rows) == pytest.approx(0.75, abs=0.01)
    counts = Counter(numbers)
    assert max(counts.values()) - min(counts.values()) <= 1, "each once an epoch"
    again = Dataset(run(texts / "out", mixture="numbers=3 letters=1"))
    assert np.array_equal(again.batch(500, 2)[0], dataset.batch(500, 2)[0])
    other = Dataset(run(texts / "out", mixture="numbers=3 letters=1", seed=2))
    assert not np.array_equal(other.batch(500, 2)[0], dataset.batch(500, 2)[0])
    assert dataset.validation_batches >= 1
    aside = {row.tobytes() for index in range(dataset.validation_batches) for row in dataset.validation_batch(index)[0]}
    assert not aside & set(numbers)


def test_a_mixture_that_changes_lets_each_part_go_on_where_it_was(texts: Path) -> None:
    """No sample of a part comes twice before all of it have come, however often the weights change; a part that began
    with nothing starts at its beginning; and a batch of a step needs no look at those before it."""
    first = Turns([TURN - 1000, 1000, 0], 7, "training")
    second = Turns([0, TURN // 2, TURN // 2], 7, "training from 5000", 5000, first.drawn(5000))
    third = Turns([TURN, 0, 0], 7, "training from 9000", 9000, second.drawn(9000))
    found = [
        turns.find(n)
        for turns, a, b in ((first, 0, 5000), (second, 5000, 9000), (third, 9000, 9500))
        for n in range(a, b)
    ]
    for part in range(3):
        assert [place for owner, place in found if owner == part] == list(range(sum(p == part for p, _ in found)))
    assert sum(third.drawn(9500)) == 9500 and third.drawn(9000) == second.drawn(9000)


def test_batches_follow_the_mixture_of_their_step(texts: Path) -> None:
    """Before the change as ever; from its step on by the new weights; equal for two readers."""
    sources = [("a", str(texts / "letters.jsonl")), ("b", str(texts / "numbers.txt"))]
    prepare(sources, "text", "bytes", texts / "out")
    config = run(texts / "out", mixture="a=1 b=0")
    one, two = Dataset(config), Dataset(config)
    changes = ((4, "a=0 b=1"), (8, "a=1 b=1"))
    plain = [one.batch(step, 0)[0].tolist() for step in range(12)]
    later = [one.batch(step, 0, tuple(c for c in changes if c[0] <= step))[0].tolist() for step in range(12)]
    assert later[:4] == plain[:4] and later[4:8] != plain[4:8]
    assert two.batch(9, 0, changes)[0].tolist() == later[9]


def test_turns_are_a_bijection() -> None:
    """Each part's samples come once each, in turns with exactly its share."""
    found = shares({"a": 1.0, "b": 2.0}, ["a", "b", "c"])
    assert sum(found) == TURN and found[2] == 0 and abs(found[0] - TURN / 3) < 1
    turns = Turns(found, 7, "training")
    pairs = [turns.find(number) for number in range(2 * TURN)]
    for part in (0, 1):
        assert sorted(place for each, place in pairs if each == part) == list(range(2 * found[part]))
    assert [part for part, _ in pairs[:TURN]] != [part for part, _ in pairs[TURN:]]


@pytest.mark.parametrize(
    ("mixture", "says"),
    [
        ("numbers=0 letters=0", "sum to zero"),
        ("numbers=1 books=1", "no part books"),
        ("numbers=1 letters=0.00001", "less than one of"),
        ("numbers", "is not NAME=WEIGHT"),
        ("numbers=-1", "is not NAME=WEIGHT"),
        ("numbers=nan", "is not NAME=WEIGHT"),
        ("numbers=1 numbers=2", "twice"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(texts: Path, mixture: str, says: str) -> None:
    """With a sentence that names the key."""
    sources = [("letters", str(texts / "letters.jsonl")), ("numbers", str(texts / "numbers.txt"))]
    prepare(sources, "text", "bytes", texts / "out")
    with pytest.raises(BadInputError, match=rf"^data\.mixture: .*{says}"):
        Dataset(run(texts / "out", mixture=mixture))


def test_keys_that_do_not_fit_the_folder_say_what_to_write(texts: Path) -> None:
    """A tokenizer beside the folder's own, a mixture of plain text, `prepared` without a folder."""
    source = texts / "numbers.txt"
    prepare([("n", str(source))], "text", "bytes", texts / "out")
    with pytest.raises(BadInputError, match=r'^data\.tokenizer: .*write tokenizer = "prepared"'):
        Dataset(run(texts / "out", "bpe:300"))
    with pytest.raises(BadInputError, match=r"^data\.mixture: needs"):
        Dataset(run(source, "bytes", "n=1"))
    with pytest.raises(BadInputError, match=r"^data\.tokenizer: only a folder"):
        Dataset(run(source, "prepared"))


def test_a_prepared_folder_must_be_lent_like_any_path(texts: Path, tmp_path: Path) -> None:
    """Without --data it is refused, with the folder lent it is read; its own tokenizer needs no further word, and no
    name in data.json leads out of it."""
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "lent" / "out")
    config = run(texts / "lent" / "out")
    with pytest.raises(BadInputError, match=r"^data\.source: .*--data"):
        Allowed().check(config)
    assert named_paths(config) == (str(texts / "lent" / "out"),)
    Allowed(data=(texts / "lent",)).check(config)
    index = texts / "lent" / "out" / "data.json"
    content = json.loads(index.read_text())
    content["parts"][0]["name"] = "../../numbers"
    index.write_text(json.dumps(content))
    assert len(Dataset(config).batch(0, 0)[0]) == 2, "names of parts are words, never paths"
    content["files"] = ["../../numbers.txt"]
    index.write_text(json.dumps(content))
    with pytest.raises(BadInputError, match=r"^data\.source: .*not what `data prepare` writes"):
        Dataset(config)


def test_damage_is_found(texts: Path) -> None:
    """A file cut short is found at once, a token that cannot be when it is read, any change by --check."""
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "out")
    tokens = texts / "out" / "tokens-00-00000.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:100] + b"\x31\x00" + content[102:])
    with pytest.raises(BadInputError, match="its hash is not"):
        PreparedFolder.open(str(texts / "out")).check()
    tokens.write_bytes(b"\xff" * len(content))
    with pytest.raises(BadInputError, match="is damaged"):
        Dataset(run(texts / "out")).batch(0, 0)
    tokens.write_bytes(content[:-1])
    with pytest.raises(BadInputError, match="copy the folder again"):
        Dataset(run(texts / "out"))
    tokens.unlink()
    with pytest.raises(BadInputError, match="cannot be read"):
        Dataset(run(texts / "out"))
    index = texts / "out" / "data.json"
    index.write_bytes(index.read_bytes().replace(b'"n"', b'"\xff"'))
    with pytest.raises(BadInputError, match="is not what `data prepare` writes"):
        Dataset(run(texts / "out"))
    row = FileRow([(texts / "numbers.txt", 10**6)], 2, 1 << 16)
    with pytest.raises(BadInputError, match="is damaged"):
        row.cut(10**6 - 10, 10**6)


def test_a_folder_that_is_prepared_again_under_a_run_ends_its_reading(texts: Path) -> None:
    """Files are opened for every cut: what lies under the same name by then may be another text, and no sample of it
    may be taken for one of the run's. The same data, copied again, is the same."""
    out = texts / "out"
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", out)
    data = Dataset(run(out))
    before = data.batch(0, 0)
    shutil.copytree(out, texts / "copy")
    shutil.rmtree(out)
    (texts / "copy").rename(out)
    assert np.array_equal(data.batch(0, 0)[0], before[0])

    shutil.rmtree(out)
    prepare([("n", str(texts / "letters.jsonl"))], "text", "bytes", out)
    with pytest.raises(BadInputError, match=r"^data\.source: .*holds other data than it did"):
        data.batch(0, 0)
    shutil.rmtree(out)
    with pytest.raises(BadInputError, match=r"^data\.source: .*data\.json cannot be read: No such file"):
        data.batch(0, 0)


def test_of_a_large_document_only_its_beginning_is_read(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of text is one document: to show two thousand letters of a terabyte takes no terabyte."""
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "out")
    cuts: list[int] = []
    cut = FileRow.cut

    def counted(row: FileRow, begin: int, end: int) -> Tokens:
        cuts.append(end - begin)
        return cut(row, begin, end)

    monkeypatch.setattr(FileRow, "cut", counted)
    monkeypatch.setattr("node.commands.data._SHOWN_CHARACTERS", 10)
    shown = CliRunner().invoke(command, ["show", str(texts / "out"), "--document", "0"])
    assert shown.output == "0000 0001  …\n" and cuts == [40]


def test_what_is_shown_gives_no_orders_to_the_terminal(texts: Path) -> None:
    """Text from the web may, and a folder from elsewhere."""
    (texts / "a.txt").write_text("before \x1b]0;title\x07 after\nnext line")
    prepare([("a", str(texts / "a.txt"))], "text", "bytes", texts / "out")
    index = texts / "out" / "data.json"
    content = json.loads(index.read_text())
    content["tokenizer"] = content["parts"][0]["name"] = "\x1b[2J"
    index.write_text(json.dumps(content))
    for more in ([], ["--document", "0"]):
        shown = CliRunner().invoke(command, ["show", str(texts / "out"), *more])
        assert shown.exit_code == 0 and "\x1b" not in shown.output and "\x07" not in shown.output
    assert shown.output.startswith("before ") and " after\nnext line\n" in shown.output


def test_a_read_that_brings_less_is_gone_on_with(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems of networks may: what is missing is asked for, and not taken for damage."""
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "out")
    whole = PreparedFolder.open(str(texts / "out")).rows[0].cut(0, 1000)
    opened = Path.open

    class Slow(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 7)) or b""

    def slow(path: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        return Slow(path) if buffering == 0 else opened(path, mode, buffering, **more)

    monkeypatch.setattr(Path, "open", slow)
    assert np.array_equal(PreparedFolder.open(str(texts / "out")).rows[0].cut(0, 1000), whole)


def test_half_a_folder_is_never_taken_for_a_whole_one(texts: Path) -> None:
    """When a source fails in the middle nothing is left; a folder that is there already is not touched."""
    (texts / "bad.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    with pytest.raises(BadInputError, match="text_field"):
        prepare([("n", str(texts / "numbers.txt")), ("bad", str(texts / "bad.jsonl"))], "text", "bytes", texts / "out")
    assert not (texts / "out").exists() and not (texts / "out.partial").exists()
    with pytest.raises(BadInputError, match=r"--out: .*is there already"):
        prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts)


def test_two_who_prepare_one_folder_do_not_mix(texts: Path) -> None:
    """The second is refused while the first writes: it would take its files away from under it, and a folder with the
    index of one and half the tokens of the other would get the name."""
    numbers, letters = str(texts / "numbers.txt"), str(texts / "letters.jsonl")
    refused: list[str] = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(BadInputError) as caught:
            prepare([("letters", letters)], "text", "bytes", texts / "out")
        refused.append(str(caught.value))

    prepare([("numbers", numbers)], "text", "bytes", texts / "out", meanwhile)
    assert refused and set(refused) == {f"--out: another process prepares {texts / 'out'}"}
    PreparedFolder.open(str(texts / "out")).check()
    assert sorted(path.name for path in texts.iterdir()) == ["letters.jsonl", "numbers.txt", "out"]


def test_what_was_killed_is_cleared_away_and_nothing_of_somebody_else(texts: Path) -> None:
    """The folder beside it has a name that others may use."""
    partial = texts / "out.partial"
    partial.mkdir()
    (partial / "tokens-00-00000.bin").write_bytes(b"half")
    (partial / "thesis.txt").write_text("precious")
    with pytest.raises(BadInputError, match=r"--out: .*out\.partial is there and holds other files"):
        prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "out")
    assert (partial / "thesis.txt").read_text() == "precious" and not (texts / "out").exists()
    (partial / "thesis.txt").unlink()
    prepare([("n", str(texts / "numbers.txt"))], "text", "bytes", texts / "out")
    assert (texts / "out").is_dir() and not partial.exists()


def test_the_command_prepares_shows_and_says_what_to_write(texts: Path) -> None:
    """`data prepare` prints the lines for RUN.toml, `data show` the parts, a document, and whether all is whole."""
    invoke = CliRunner().invoke
    out = texts / "out"
    made = invoke(
        command, ["prepare", f"digits={texts / 'numbers.txt'}", str(texts / "letters.jsonl"), "--out", str(out)]
    )
    assert made.exit_code == 0, made.output
    assert f'source = "{out}"' in made.output and 'tokenizer = "prepared"' in made.output
    assert "# mixture = " in made.output and "digits=" in made.output and "letters=" in made.output
    shown = invoke(command, ["show", str(out), "--check"])
    assert shown.exit_code == 0 and "40 documents" in shown.output and "every token is what was written" in shown.output
    assert invoke(command, ["show", str(out), "--document", "1", "--part", "letters"]).output.strip() == "b" * 50


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["prepare", "missing.txt", "--out", "out"], "data.source: no "),
        (["prepare", "builtin:grammar", "--out", "out"], "SOURCE: builtin:grammar has no end"),
        (["prepare", "a.txt", "a=a.txt", "--out", "out"], "SOURCE: two sources are called a"),
        (["prepare", "B!=a.txt", "--out", "out"], "SOURCE: 'B!' is no name"),
        (["prepare", "empty.txt", "--out", "out"], "SOURCE: empty.txt holds no text"),
        (["prepare", "a.txt", "--tokenizer", "bpe:3", "--out", "out"], "data.tokenizer: "),
        (["prepare", "a.txt", "--out", "."], "--out: . has no name of its own"),
        (["prepare", "a.txt", "--out", "out/.."], "--out: out/.. has no name of its own"),
        (["prepare", "~nobody-here/a.txt", "--out", "out"], "data.source: '~nobody-here/a.txt' begins with the home"),
        (["prepare", f"a={'x' * 300}", "--out", "out"], "data.source: 'xxx"),
        (["show", "nothing"], "FOLDER: there is no data.json"),
    ],
)
def test_bad_lines_end_in_one_sentence_and_code_2(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(type(main), "get_command", lambda *_: command)
    (tmp_path / "a.txt").write_text("some words")
    (tmp_path / "empty.txt").write_text("\n")
    ended = CliRunner().invoke(main, ["data", *arguments])
    assert ended.exit_code == 2
    assert ended.stderr.startswith(says) and ended.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()

"""What `barnraise data prepare` takes: time and memory for a corpus of any size, and what a batch of it costs.

    python -m tests.benchmarks.prepare [--gigabytes 1] [--kind txt|jsonl|parquet] [--tokenizer bytes|bpe:2048]

Makes a synthetic corpus of whole files (no holes in them) in a new folder, prepares it in a process of its own, and
reads batches of it in another; prints seconds, megabytes a second and the most memory that each process had. It needs
about four times the corpus on the disk for `bytes`.

Seen with `--gigabytes 10` on two busy cores: 335 s (29.9 MB/s), at most 45 MB of memory; then 136 us a sample of 2,048
tokens, at most 39 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_FILE_BYTES = 256 << 20
_MEASURED = "import resource, sys; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)"
_PREPARE = """
import sys
from pathlib import Path
from node.data.prepared import prepare
prepare([("corpus", sys.argv[1])], "text", sys.argv[3], Path(sys.argv[2]))
"""
_READ = """
import sys, time
from node.data.dataset import Dataset
from protocol.run.run import *
data = Dataset(RunConfig(model=ModelSection(context=2048), data=DataSection(source=sys.argv[1], tokenizer="prepared")))
began = time.perf_counter()
for step in range(500):
    for microbatch in range(8):
        data.batch(step * 97, microbatch)
print(f"{(time.perf_counter() - began) / 8000 * 1e6:.0f} us a sample of 2,048 tokens")
"""


def paragraphs(rng: random.Random) -> Iterator[str]:
    """Endless paragraphs of made-up words that follow Zipf's law; about 600 bytes each."""
    words = ["".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randrange(1, 11))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    pool = [" ".join(rng.choices(words, weights, k=100)) for _ in range(2000)]
    while True:
        yield rng.choice(pool) + " " + rng.choice(pool)


def write_corpus(folder: Path, size: int, kind: str) -> None:
    """Files of at most 256 MiB that have `size` bytes of text together; every paragraph is a document, but in .txt."""
    source = paragraphs(random.Random(1))
    number = 0
    while size > 0:
        wanted = min(size, _FILE_BYTES)
        size -= wanted
        path = folder / f"corpus-{number:03d}.{kind}"
        number += 1
        if kind == "parquet":
            _write_parquet(path, source, wanted)
            continue
        with path.open("w", encoding="utf-8") as file:
            while wanted > 0:
                text = next(source)
                wanted -= len(text)
                file.write(f"{text}\n" if kind == "txt" else json.dumps({"text": text}) + "\n")


def _write_parquet(path: Path, source: Iterator[str], wanted: int) -> None:
    import pyarrow
    import pyarrow.parquet

    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())])) as writer:
        while wanted > 0:
            rows = [next(source) for _ in range(10_000)]
            wanted -= sum(map(len, rows))
            writer.write_table(pyarrow.table({"text": rows}))


def measured(code: str, *arguments: str) -> tuple[float, int, str]:
    """Seconds, most megabytes of memory, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{_MEASURED}", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return time.perf_counter() - began, int(done.stderr.split()[-1]), done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--kind", choices=["txt", "jsonl", "parquet"], default="txt")
    parser.add_argument("--tokenizer", default="bytes")
    chosen = parser.parse_args()
    size = int(chosen.gigabytes * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        corpus, out = Path(scratch, "corpus"), Path(scratch, "out")
        corpus.mkdir()
        write_corpus(corpus, size, chosen.kind)
        seconds, memory, _ = measured(_PREPARE, str(corpus), str(out), chosen.tokenizer)
        about = f"{chosen.gigabytes:g} GB of {chosen.kind} with {chosen.tokenizer}"
        print(f"prepare  {about}: {seconds:.0f} s, {size / seconds / 1e6:.1f} MB/s, at most {memory} MB of memory")
        _, memory, printed = measured(_READ, str(out))
        print(f"read     {printed}, at most {memory} MB of memory")


if __name__ == "__main__":
    main()

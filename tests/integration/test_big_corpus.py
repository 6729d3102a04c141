"""A gigabyte of text, as an operator meets it: a slip in its path, prepared in little memory, trained on by servers."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.prepare import write_corpus
from tests.integration.swarm import RUN, Swarm, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CORPUS_BYTES = 10**9
MEMORY_MOST_MB = 300
"""Whatever the corpus is long: a run's servers have other things to keep."""


def barnraise(folder: Path, *words: str) -> tuple[int, str, int]:
    """(exit code, what it said, the most megabytes of memory that it had).

    What the system says of a process that has ended counts whoever started it, too: so it is asked meanwhile.
    """
    command = [sys.executable, "-m", "protocol.cli", *words]
    most_kb = 0
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            if (found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)) and int(found[1]) > 0:
                ours = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[:-1]
                most_kb = max(most_kb, int(found[1])) if ours == [word.encode() for word in command] else 0
            time.sleep(0.05)  # the most that it ever had is a number that only grows
        said.seek(0)
        return process.returncode, said.read(), most_kb // 1024


@pytest.mark.long
def test_a_gigabyte_of_text_is_prepared_in_little_memory_and_trained_on(tmp_path: Path) -> None:
    """Real files without holes. A slip in the run file's path is told in a sentence before anybody joins, and no
    more once it is corrected; stage 0 reads the folder without taking it into memory, and steps close."""
    corpus, data = tmp_path / "corpus", tmp_path / "tokens"
    corpus.mkdir()
    write_corpus(corpus, CORPUS_BYTES, "txt")
    files = list(corpus.iterdir())
    assert sum(file.stat().st_size for file in files) >= CORPUS_BYTES
    assert sum(file.stat().st_blocks * 512 for file in files) >= CORPUS_BYTES, "no holes"
    began = time.monotonic()
    code, said, memory_mb = barnraise(tmp_path, "data", "prepare", f"text={corpus}/*.txt", "--out", str(data))
    assert code == 0, said
    print(f"prepared in {time.monotonic() - began:.0f} s, at most {memory_mb} MB of memory")
    assert memory_mb < MEMORY_MOST_MB
    right = RUN.replace('source = "builtin:grammar"', f'source = "{data}"\ntokenizer = "prepared"')
    (tmp_path / "wrong.toml").write_text(right.replace(str(data), f"{data}s"))
    code, said, _ = barnraise(tmp_path, "run", "check", str(tmp_path / "wrong.toml"))
    assert code == 0 and f"data.source: {data}s is not on this computer" in said, said
    (tmp_path / "right.toml").write_text(right)
    code, said, _ = barnraise(tmp_path, "run", "check", str(tmp_path / "right.toml"))
    assert code == 0 and "is not on this computer" not in said, said
    with Swarm(tmp_path, right, more=("--data", str(data))) as swarm:
        eventually(lambda: swarm.step() >= 3, "some steps")
        most = max(server.resident_bytes() for server in swarm.servers)
        least = min(server.resident_bytes() for server in swarm.servers)
        print(f"servers have {least >> 20} to {most >> 20} MB: those that read the data as much as the others")
        assert most - least < MEMORY_MOST_MB << 20

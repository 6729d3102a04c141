"""The memory that a shard really takes, beside what is counted for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import re, sys
from pathlib import Path
import torch
from node.compute.forms import p12, packed
from node.compute.layout import StageLayout
from node.compute.shard import ShardWorker
from node.compute.side_by_side import THREAD_BYTES, SideBySide
from protocol.run.memory import server_parameter_bytes
from protocol.run.run import ModelSection, RunConfig

def of_process(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
config = RunConfig(model=ModelSection(layers=10, hidden=512, heads=8, kv_heads=8, feed_forward=1376, context=64))
layout = StageLayout(config, 257, 1, 21)
small = ShardWorker(StageLayout(config, 257, 1, 2), 0, 1)
small.initial()  # what is loaded with the first use
threads = SideBySide(int(sys.argv[1]))
shard = ShardWorker(layout, 0, 2, threads)
count = shard.end - shard.begin
numbers = torch.randint(-9, 9, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
part = packed.pack(numbers.numpy())
del numbers
before = of_process("VmRSS")
shard.initial()
Path("/proc/self/clear_refs").write_text("5")  # the most so far is what it is now
sums = {}
for step in range(4):
    shard.fold_packed(step, part)
    sums[step] = shard.reduce(step)[0]
    shard.fold_packed(step + 1, part)  # of the next step some are there already
    shard.apply(step, sums.pop(step), step, 1.0)
    p12.encode(shard.params(step + 1), shard.params(step), step, 12, threads)
    shard.drop_below(config.version_of(step + 1), step + 1)
counted = server_parameter_bytes(config) * count + THREAD_BYTES * (int(sys.argv[1]) - 1)
print((of_process("VmHWM") - before) / counted)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process had at most is read from /proc")
@pytest.mark.parametrize("threads", [1, 8])
def test_a_shard_takes_what_is_counted_and_no_more(threads: int) -> None:
    """Sixteen million parameters through four steps, as a server's lane does them: within a tenth, and a fixed amount
    for each further thread."""
    command = [sys.executable, "-c", STEPS, str(threads)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert 0.85 < float(found.stdout) < 1.1, found.stdout

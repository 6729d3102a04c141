"""The memory that a stage's tasks really take on a device, beside what is counted: here that is the processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import re, sys
from pathlib import Path
import torch
from node.compute.stage_grid import StageGrid
from node.compute.worker import StageWorker
from protocol.run.run import BatchSection, ModelSection, RunConfig

def of_process(what):
    return 1024 * int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

first, end, layers, vocabulary, context = (int(word) for word in sys.argv[1:])
model = ModelSection(layers=layers, hidden=512, heads=8, kv_heads=4, feed_forward=1376, context=context)
config = RunConfig(model=model, batch=BatchSection(samples=1, microbatches=2))

def microbatch(worker, key, x):
    if worker.layout.has_head:
        worker.tail(1, x, torch.zeros(x.shape[:2], dtype=torch.int64), "sum")
    else:
        dy = worker.forward(key, 1, x)
        return lambda: worker.backward(key, dy, "sum")
    return lambda: None

def ready(worker):
    grid = StageGrid.of(worker.layout)
    for version in range(2):
        values = torch.randn(worker.layout.parameter_count) * 0.02
        worker.set_params(version, [values])
        worker.set_grid(version, [grid.steps(grid.first_averages())])
    return torch.randn(1, context, 512)

small = StageWorker(config, 257, max(first, end - 3), end)
microbatch(small, 0, ready(small))()  # what is loaded with the first use
small.close()
before = of_process("VmRSS")
worker = StageWorker(config, vocabulary, first, end)
x = ready(worker)
microbatch(worker, "first", x)()
Path("/proc/self/clear_refs").write_text("5")  # the most so far is what it is now
graphs = 1 if worker.layout.has_head else 2
for back in [microbatch(worker, number, x) for number in range(graphs)]:
    back()
counted = worker.memory.fixed_bytes() + (graphs - 1) * worker.memory.graph_bytes
print((of_process("VmHWM") - before) / counted)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process had at most is read from /proc")
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("many parameters, few tokens", (1, 17, 8, 257, 128)),
        pytest.param("few parameters, many tokens", (1, 13, 6, 257, 2048), marks=pytest.mark.slow),
        pytest.param("a head with many scores", (3, 6, 2, 16_000, 1024), marks=pytest.mark.slow),
        ("a head with many parameters", (3, 6, 2, 32_000, 64)),
    ],
)
def test_tasks_take_what_is_counted_and_no_more(what: str, words: tuple[int, ...]) -> None:
    """Two versions, a sum, and a backward beside another graph: a tenth more at most. (A copy of all gradients in fp64,
    made to see whether they are finite, was uncounted, and on a GPU the peak, where what is counted is right within
    1.2 %.) Here a peak is also less, by what the allocator hands back between two allocations, which is another share
    on other processors: 0.82 to 0.95 of a head with many scores."""
    command = [sys.executable, "-c", STEPS, *(str(word) for word in words)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert 0.75 < float(found.stdout) < 1.1, f"{what}: {found.stdout}"

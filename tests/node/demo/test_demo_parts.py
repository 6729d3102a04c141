"""The demo's parts: the run it writes, the sums it makes, whom it kills, and that no process is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from node.demo import run
from node.demo.chaos import Plan
from node.demo.options import DemoOptions, to_toml, with_checkpoints
from node.demo.processes import Children
from node.demo.status import Tally
from node.demo.view import PlainView, clock, sparkline, time_left
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run
from protocol.run.run import RunConfig


def test_the_run_file_reads_back_as_the_same_run(tmp_path: Path) -> None:
    """Every section, strings with quotes and small numbers included."""
    config = DemoOptions(steps=7, seed=9, stages=3, delay=0, data='od"d\\path').run()
    config = with_checkpoints(config, tmp_path / "chäck points")
    path = tmp_path / "RUN.toml"
    path.write_text(to_toml(config))
    assert load_run(path) == config
    assert (config.steps, config.seed, config.stages.count, config.batch.delay) == (7, 9, 3, 0)
    assert Path(config.checkpoint.folder).is_absolute()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    """`--config` gives what the options leave open."""
    path = tmp_path / "RUN.toml"
    path.write_text("name = 'mine'\nsteps = 50\n")
    config = DemoOptions(config=path, steps=5).run()
    assert (config.name, config.steps, config.seed) == ("mine", 5, RunConfig().seed)


def test_counters_of_restarted_processes_add_up() -> None:
    """A counter that went down belongs to a new process of the same node: the old one's total stays in the sum."""
    tally = Tally()
    for value in (5.0, 9.0, 2.0, 3.0):
        tally.take({"members": [{"id": "a", "counters": {"reissued": value, "bytes_tx_data": 10 * value}}]})
    tally.take({"members": [{"id": "b", "counters": {"reissued": 1.0}}, {"id": "c", "counters": {}}]})
    assert tally.total("reissued") == 9 + 3 + 1
    assert tally.by_prefix("bytes_tx_") == {"data": 120.0}


def test_one_kill_is_due_for_every_so_many_steps() -> None:
    """A kill that found no victim stays due; single kills are due once."""
    plan = Plan(DemoOptions(chaos=5), random.Random(1))
    assert [step for step in range(11) if plan.volunteer_due(step)] == [5, 6, 7, 8, 9, 10]
    assert (plan.spared_all(4), plan.spared_all(5)) == (False, True)
    plan.volunteer_kills = 1
    assert not plan.spared_all(10)
    assert [step for step in range(11) if plan.volunteer_due(step)] == [10]
    assert [plan.due("server", 3, step) for step in (2, 3, 4)] == [False, True, False]
    assert not plan.due("coordinator", None, 100)


def test_a_curve_is_drawn_by_means() -> None:
    """Few values one by one, many by the mean of their share; a flat curve is flat."""
    assert sparkline([3.0, 2.0, 1.0], 60) == "█▅▁"
    assert len(sparkline([float(n) for n in range(1000)], 60)) == 60
    assert sparkline([2.0, 2.0], 60) == "▁▁" and sparkline([], 60) == ""
    assert clock(75.9) == "1:15"


def alive(pid: int) -> bool:
    """Whether a process runs (and is no zombie)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_child_is_left_when_the_demo_ends_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle ends all children, those too that do not want to."""
    monkeypatch.setattr("node.demo.processes.GRACE_S", 0.2)
    real = subprocess.Popen
    monkeypatch.setattr(
        "node.demo.processes.subprocess.Popen",
        lambda command, **options: real([sys.executable, "-c", STUBBORN], **options),
    )
    children = Children()

    def fail_in_the_middle() -> None:
        with children:
            child = children.start("one", tmp_path / "one", ["--version"])
            while b"up" not in child.log_path.read_bytes():
                time.sleep(0.01)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_the_middle()
    assert not children.running


PARENT = """
import sys, time
from pathlib import Path
import node.demo.processes as processes
real = processes.subprocess.Popen
processes.subprocess.Popen = lambda command, **options: real(
    [sys.executable, "-c", "import time; time.sleep(600)"], **options)
children = processes.Children()
print(children.start("one", Path(sys.argv[1]), []).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")
def test_children_die_with_a_demo_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL of the demo itself leaves nothing behind."""
    environment = {**os.environ, "PYTHONPATH": "."}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_gone(pid)


def test_the_time_left_follows_the_speed_that_is_shown() -> None:
    """Not the seconds since the start, most of which go into starting processes; nothing before a speed is known."""
    config = RunConfig(steps=600)
    assert config.step_tokens == 2048
    assert time_left(config, 100, 2048.0) == clock(500)
    assert time_left(config, 600, 2048.0) == clock(0)
    assert time_left(config, 1, 0.0) == "-"


@pytest.mark.parametrize(
    ("sparse", "steps", "first", "shown"),
    [
        (False, 4, 0, [1, 2, 3, 4]),
        (True, 604, 0, [1, *range(10, 601, 10), 604]),
        (True, 604, 595, [596, 600, 604]),
        (True, 40, 0, [1, *range(2, 41, 2)]),
        (True, 2, 0, [1, 2]),
    ],
)
def test_a_log_nobody_asked_to_be_complete_is_short(
    sparse: bool, steps: int, first: int, shown: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tenth step of a long run, more of a short one; always the first that was seen, and the last."""
    view = PlainView(RunConfig(steps=steps), sparse)
    for step in range(first, steps):
        view.step(step, 5.0, 100.0)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == shown


def test_an_interruption_that_python_drops_ends_the_demo_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raised in a destructor, KeyboardInterrupt is printed and forgotten; the next look remembers it."""
    options = DemoOptions(out=tmp_path / "out", state=tmp_path / "state")
    demo = run._Demo(options, options.run(), tmp_path / "state")
    monkeypatch.setattr(run, "LOOK_S", 0.0)
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    with demo.interruptible():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            demo._rest()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"servers": 1, "settings": ("stages.count=auto",)}, "stages.count: 1 server, but 2 are wanted at the least"),
        ({"settings": ("stages.count=auto",)}, 'stages.count: "auto" needs --servers'),
        ({"servers": 3}, "stages.count: 3 servers, but 4 are wanted for 2 stages"),
        ({"reference": True, "settings": ("stages.cut=planned",)}, "stages.cut: --reference plans nothing"),
        ({"settings": ("stages.cut=3 4",)}, "stages.cut: 2 blocks, but 2 parts begin at 1"),
    ],
)
def test_stages_that_a_demo_cannot_have_are_refused_by_their_key(options: dict[str, Any], sentence: str) -> None:
    """Before anything is started, and in one sentence: the command ends with code 2."""
    with pytest.raises(BadInputError) as refusal:
        DemoOptions(**options).run()
    assert str(refusal.value).startswith(sentence)

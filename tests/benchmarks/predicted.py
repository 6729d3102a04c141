"""Predicted beside measured on shaped lines: `python -m tests.benchmarks.predicted FILE [--only NAME]` (root).

Each case is a run of real processes, each in a network namespace of its own on one bridge, with its line shaped both
ways (tc tbf) and, where a case says so, its share of a core (control group); no delay is added here. Lines, or shares
that together are one core, set the pace, and not this computer. When some steps have closed, `POST /api/trace` asks
everybody and has the plan predicted (`coordinator.world.prediction`) from measured lines and the devices' own spans. A
row per case goes to FILE; cases that stand there already are left out, so the script may be ended and started again. A
case takes two to three minutes, all of them three quarters of an hour, on a computer with cores that nobody else uses.
Where a prediction is off, its row is followed by what each stage and kind of way did, both as predicted and as
measured: tasks that take longer than predicted are a device that others disturbed, ways that carry less are lines, and
waits where neither differs are the pipeline. A case that fails prints where its run stood and the ends of all logs.

    even      four volunteers alike, two stages cut evenly
    planned   the same, cut by the planner
    skip      the same with four stages of which each microbatch leaves out one
    N stages  twelve layers in four or six stages, none or some left out (times for `tests.benchmarks.skipping`)
    segments  the same with three segments
    split     the same with the backward in two halves
    lines     three volunteers, two of them with a line ten times slower: even and as planned
    sums      the same with few tokens and many parameters, so that sums of gradients fill the lines
    devices   three volunteers, two of them with a device four times slower: even and as planned
    joined    `even`, and then a volunteer with 2 Mbit/s up joins: what that costs the run

In the planned cases of lines, sums and devices the planner is asked once more when the volunteers have shown what they
have (`run replan stages.cut=planned`): the first plan is made before anybody of them is there.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from coordinator.world.traces import Side, link_rows, read_trace, stage_rows
from node.demo.processes import Child, Children

PREFIX = "brp-"
NET = "10.78.0"
RUN = """
name = "{name}"
steps = 1000000
[model]
layers = {layers}
hidden = {hidden}
heads = 4
kv_heads = 4
feed_forward = {feed_forward}
context = {context}
[data]
source = "builtin:grammar"
[batch]
microbatches = {microbatches}
samples = {samples}
segments = {segments}
[stages]
count = {stages}
collocated = "never"
{more}
[checkpoint]
every_steps = 0
folder = "{folder}"
[audit]
rate = 0.0
"""


@dataclass(frozen=True)
class Case:
    """One run: lines in Mbit/s (up, down) of each server and volunteer, and the volunteers' shares of a core."""

    name: str
    servers: tuple[tuple[float, float], ...]
    volunteers: tuple[tuple[float, float], ...]
    stages: int
    layers: int = 4
    hidden: int = 128
    samples: int = 8
    context: int = 128
    microbatches: int = 8
    segments: int = 1
    more: str = ""
    """Of `[stages]`, and tables after it."""
    shares: tuple[float, ...] = ()
    """Of a core, of each volunteer's device; none: all have equal ones."""
    joins: tuple[tuple[float, float], ...] = ()
    """Lines of volunteers that come when the run has been measured once."""
    delay_ms: float = 0.0
    """One way, of each volunteer's line."""
    is_planned_again: bool = False
    """Whether the planner is asked once more, for the volunteers that are there."""

    def all_shares(self) -> tuple[float, ...]:
        return self.shares or (SHARES / len(self.volunteers),) * len(self.volunteers)

    def toml(self, folder: Path) -> str:
        return RUN.format(
            name=re.sub("[^a-z0-9]+", "-", self.name),
            stages=self.stages, layers=self.layers, hidden=self.hidden, feed_forward=2 * self.hidden,
            samples=self.samples, context=self.context, microbatches=self.microbatches, segments=self.segments,
            more=self.more, folder=folder,
        )  # fmt: skip


HOME = (2.0, 8.0)
WIDE = (20.0, 80.0)
CABLE = (8.0, 32.0)
FIBRE = (100.0, 100.0)
SERVER = (20.0, 20.0)
SHARES = 0.8
"""Of all devices together, unless a case says more: the other core is for servers and daemons, so nobody waits."""
FAST_SHARE, SLOW_SHARE = 0.5, 0.125
CASES = (
    Case("even", (SERVER,) * 4, (HOME,) * 4, 2),
    Case("planned", (SERVER,) * 4, (HOME,) * 4, 2, more='cut = "planned"'),
    Case("skip 1 of 4", (SERVER,) * 8, (HOME,) * 4, 4, layers=6, more="[routes]\nskip = 0.25"),
    Case("three segments", (SERVER,) * 4, (HOME,) * 4, 2, segments=3),
    Case("split backward", (SERVER,) * 4, (HOME,) * 4, 2, more="[compute]\nsplit_backward = true"),
    Case("lines, even", (FIBRE,) * 4, (WIDE, HOME, HOME), 2),
    Case("lines, planned", (FIBRE,) * 4, (WIDE, HOME, HOME), 2, more='cut = "planned"', is_planned_again=True),
    Case("sums, even", (FIBRE,) * 4, (WIDE, HOME, HOME), 2, layers=8, hidden=256, samples=2, context=32),
    Case("sums, planned", (FIBRE,) * 4, (WIDE, HOME, HOME), 2, layers=8, hidden=256, samples=2, context=32,
         more='cut = "planned"', is_planned_again=True),
    Case("devices, even", (FIBRE,) * 4, (FIBRE,) * 3, 2, shares=(FAST_SHARE, SLOW_SHARE, SLOW_SHARE)),
    Case("devices, planned", (FIBRE,) * 4, (FIBRE,) * 3, 2, more='cut = "planned"',
         shares=(FAST_SHARE, SLOW_SHARE, SLOW_SHARE), is_planned_again=True),
    *(
        Case(f"{stages} stages, skip {skipped}", (SERVER,) * stages, (CABLE,) * stages, stages, layers=12, samples=4,
             microbatches=15, more=f"back_servers = 0\n[routes]\nskip = {skipped / stages:.2f}")
        for stages, left_out in ((4, (0, 1, 2)), (6, (0, 2, 3)))
        for skipped in left_out
    ),
    Case("joined", (SERVER,) * 4, (HOME,) * 4, 2, joins=((2.0, 20.0),)),
)  # fmt: skip


class Shares:
    """Control groups (version 1), one for each process that has a share of a core."""

    ROOT = Path("/sys/fs/cgroup/cpu")
    PERIOD_US = 10_000
    ENDED_WITHIN_S = 30.0

    def __init__(self) -> None:
        self._groups: list[Path] = []

    def words(self, name: str, share: float) -> list[str]:
        """What starts a command that has, with all its children, that much of a core."""
        group = self.ROOT / f"{PREFIX}{name}"
        group.mkdir(exist_ok=True)
        self._groups.append(group)
        (group / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(share * self.PERIOD_US)))
        return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "share"]

    def free(self, pid: int) -> None:
        """This process is in no group any more; its children stay where they are."""
        (self.ROOT / "cgroup.procs").write_text(str(pid))

    def down(self) -> None:
        """When every process of them has ended: a device's may do so a moment after its daemon's."""
        until = time.monotonic() + self.ENDED_WITHIN_S
        for group in self._groups:
            while (group / "cgroup.procs").read_text() and time.monotonic() < until:
                time.sleep(0.1)
            group.rmdir()
        self._groups.clear()


class Bed:
    """Namespaces on one bridge, one for each process, each with its line."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._carriers: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        self.down()
        _ip("netns", "add", f"{PREFIX}hub")
        self.names.append("hub")
        _in("hub", "ip", "link", "add", "bridge0", "type", "bridge")
        _in("hub", "ip", "link", "set", "bridge0", "up")
        _in("hub", "ip", "addr", "add", f"{NET}.1/24", "dev", "bridge0")
        _in("hub", "ip", "link", "set", "lo", "up")
        # Between lines with a delay and those on the bridge: the hub answers for the former, and forwards.
        for setting in ("ipv4/ip_forward", "ipv4/conf/bridge0/proxy_arp"):
            _in("hub", "sh", "-c", f"echo 1 > /proc/sys/net/{setting}")

    def add(self, name: str, number: int, up_mbit: float, down_mbit: float, delay_ms: float = 0.0) -> list[str]:
        """A computer with a line; the words that start a command there."""
        _ip("netns", "add", PREFIX + name)
        self.names.append(name)
        _in(name, "ip", "link", "set", "lo", "up")
        if delay_ms:
            self._delayed(name, number, delay_ms)
        else:
            _ip("link", "add", "line0", "netns", PREFIX + name, "type", "veth", "peer", "name", f"to-{number}",
                "netns", f"{PREFIX}hub")  # fmt: skip
            _in("hub", "ip", "link", "set", f"to-{number}", "master", "bridge0")
            _in("hub", "ip", "link", "set", f"to-{number}", "up")
            _in(name, "ip", "link", "set", "line0", "up")
            _in(name, "ip", "addr", "add", f"{NET}.{number}/24", "dev", "line0")
        # 100 ms of queue, and twenty packets at least: a modest router. With two, slow lines lose much of what is sent.
        for where, device, mbit in ((name, "line0", up_mbit), ("hub", f"to-{number}", down_mbit)):
            _in(where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{int(mbit * 1000)}kbit",
                "burst", "16kb", "limit", str(16_000 + max(30_000, int(0.1 * mbit * 125_000))))  # fmt: skip
        return within(name)

    def _delayed(self, name: str, number: int, delay_ms: float) -> None:
        """A line of TUN devices, whose packets a process carries over so much later."""
        binary = self._delay_line()
        life_s = 3600
        words = [binary, PREFIX + name, "line0", f"{PREFIX}hub", f"to-{number}", delay_ms, 0, 0, 1024, number, life_s]
        carrier = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._carriers.append(carrier)
        assert carrier.stdout is not None and carrier.stdout.readline().strip() == b"ready", "no delay line"
        for where, device in ((name, "line0"), ("hub", f"to-{number}")):
            _in(where, "ip", "link", "set", device, "up")
        _in(name, "ip", "addr", "add", f"{NET}.{number}/32", "dev", "line0")
        _in(name, "ip", "route", "add", "default", "dev", "line0")
        _in("hub", "ip", "route", "add", f"{NET}.{number}/32", "dev", f"to-{number}")

    def _delay_line(self) -> str:
        binary = Path(tempfile.gettempdir()) / f"{PREFIX}delayline"
        source = Path(__file__).parents[2] / "deploy" / "delayline.c"
        if not binary.exists() or binary.stat().st_mtime < source.stat().st_mtime:
            subprocess.run(["cc", "-O2", "-pthread", "-o", str(binary), str(source)], check=True, capture_output=True)
        return str(binary)

    def down(self) -> None:
        for carrier in self._carriers:
            carrier.terminate()
            carrier.wait()
        self._carriers.clear()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", PREFIX + name], capture_output=True, check=False)
        self.names.clear()


def within(name: str) -> list[str]:
    return ["ip", "netns", "exec", PREFIX + name]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _in(name: str, *words: str) -> None:
    subprocess.run([*within(name), *words], check=True, capture_output=True)


@contextmanager
def running(case: Case, folder: Path) -> Iterator[Running]:
    """The processes of a case, until the end of the context."""
    bed, shares = Bed(), Shares()
    children = Children()
    try:
        bed.up()
        yield Running(case, folder, bed, shares, children)
    finally:
        children.__exit__()
        bed.down()
        shares.down()


OFF_MAX, COSTS_MAX = 0.15, 0.05
LOG_LINES = 5


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What does not hold, a sentence each."""
    by_name = {row["name"]: row for row in rows}
    found = [f"{case.name}: not measured" for case in CASES if case.name not in by_name]
    found += [f"{row['name']}: the prediction is {row['off']:+.1%} off" for row in rows if abs(row["off"]) > OFF_MAX]
    for case, faster in (("sums", True), ("devices", True), ("lines", False), ("", False)):
        even, planned = (by_name.get(f"{case}, {cut}" if case else cut) for cut in ("even", "planned"))
        if even and planned:
            ratio = planned["measured_s"] / even["measured_s"]
            if ratio > (1.0 if faster else 1.05):  # one plan in both arms: 5 % are the computer's
                found.append(f"{planned['name']}: {ratio:.2f} times the even layout's step")
    for row in rows:
        if row.get("costs", 0.0) >= COSTS_MAX:
            found.append(
                f"{row['name']}: the newcomer costs {row['costs']:.1%}; `tests.benchmarks.slow_joins` has turns"
            )
    return found


class Running:
    """One run in its bed."""

    def __init__(self, case: Case, folder: Path, bed: Bed, shares: Shares, children: Children) -> None:
        self.case, self.folder, self.bed, self.shares, self.children = case, folder, bed, shares, children
        self.volunteers: list[Child] = []
        self._number = 1
        toml = folder / "RUN.toml"
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        toml.write_text(case.toml(self.checkpoints))
        home = folder / "coordinator"
        arguments = ["coordinator", str(toml), "--state", str(home), "--listen", f"{NET}.1:0"]
        self.coordinator = children.start(
            "coordinator", home, [*arguments, "--http", f"{NET}.1:8470", "--metrics", "off"], within("hub")
        )

        def found() -> Any:
            if not self.coordinator.running:
                raise RuntimeError(self.coordinator.log_tail())
            return json.loads((home / "links.json").read_text()) if (home / "links.json").exists() else None

        links = _until(found)
        self.links = home / "links.json"
        self.url = links["http"]
        self._servers = [self._node("server", links["server"], *line) for line in case.servers]
        self.volunteer_link = links["volunteer"]
        for line, share in zip(case.volunteers, case.all_shares(), strict=True):
            self.join(*line, share)

    def join(self, up_mbit: float, down_mbit: float, share: float) -> None:
        """A volunteer with such a line and, for its device, such a share of a core."""
        self.volunteers.append(self._node("join", self.volunteer_link, up_mbit, down_mbit, share))

    def free(self) -> None:
        """From here on only devices, processes of their own, have a share: the daemons beside them are not slow."""
        for child in self.volunteers:
            self.shares.free(child.pid)

    def _node(self, role: str, link: str, up_mbit: float, down_mbit: float, share: float = 0.0) -> Child:
        self._number += 1
        name = f"{'s' if role == 'server' else 'v'}{self._number}"
        delay_ms = 0.0 if role == "server" else self.case.delay_ms
        words = self.bed.add(name, self._number, up_mbit, down_mbit, delay_ms)
        if share:
            words = [*self.shares.words(name, share), *words]
        home = self.folder / name
        more = ["--listen", f"{NET}.{self._number}:0", "--checkpoints", str(self.checkpoints)]
        more = more if role == "server" else ["--yes", "--always"]
        arguments = [role, link, "--state", str(home), "--metrics", "off", "--no-punch", "--threads", "1", *more]
        return self.children.start(name, home, arguments, words)

    def ask(self, path: str, order: dict[str, Any] | None = None, patience_s: float = 170.0) -> Any:
        """The API's answer, asked within the coordinator's namespace."""
        code = (
            "import sys, json\nfrom pathlib import Path\nfrom coordinator.commands.asking import post\n"
            "from coordinator.commands.status import fetch\nurl, path, order, links = sys.argv[1:]\n"
            "found = post(url, Path(links), path, json.loads(order), 160.0) if order else fetch(f'{url}/api/{path}')\n"
            "print(json.dumps(found))"
        )
        asked = [self.url, path, json.dumps(order) if order else "", str(self.links)]
        done = subprocess.run(
            [*within("hub"), sys.executable, "-c", code, *asked], capture_output=True, text=True, timeout=patience_s
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return json.loads(done.stdout)

    @contextmanager
    def last_words(self) -> Iterator[None]:
        """What fails within it first prints where the run stands, and the end of everybody's log."""
        try:
            yield
        except (RuntimeError, subprocess.SubprocessError):
            with suppress(RuntimeError, subprocess.SubprocessError):
                found = self.ask("status", patience_s=10.0)["run"]
                print(f"step {found['step']}, waiting for: {found['waiting_for']}", file=sys.stderr)
            for log in sorted(self.folder.glob("*/log")):
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print(f"---- {log.parent.name}", *(line[:300] for line in lines), sep="\n", file=sys.stderr)
            raise

    def step(self) -> int:
        return int(self.ask("status")["run"]["step"])

    def plan_again(self, patience_s: float) -> None:
        """Asks the planner for those who are here, and waits for some steps of what it says."""
        try:
            self.ask("replan", {"settings": ["stages.cut=planned"]})
        except RuntimeError as error:
            if "has this layout already" not in str(error):
                raise
            return
        _until(lambda: self.ask("status")["ledger_generation"] > 1, patience_s)
        self.steps(4, patience_s)

    def steps(self, count: int, patience_s: float) -> None:
        """Waits until so many more have closed."""
        wanted, end = self.step() + count, time.monotonic() + patience_s
        while self.step() < wanted:
            if time.monotonic() > end:
                raise RuntimeError(f"{self.step()} of {wanted} steps: {self.ask('status')['run']['waiting_for']}")
            time.sleep(1.0)


def _until(ready: Any, patience_s: float = 60.0) -> Any:
    end = time.monotonic() + patience_s
    while not (found := ready()):
        if time.monotonic() > end:
            raise RuntimeError("nothing came")
        time.sleep(0.1)
    return found


# ---- cases ----------------------------------------------------------------------------------------------------------


def measure(run: Running, seconds: float) -> dict[str, Any]:
    """One trace: predicted and measured seconds a step, and what the stages did."""
    trace = read_trace(run.ask("trace", {"seconds": seconds}))
    if trace.predicted is None:
        raise RuntimeError(trace.no_prediction)
    tasks = [node.of("forward", "backward", "loss")["seconds"] for node in trace.measured.nodes]
    lengths = [float(length) for part in tasks for length in part]
    return {
        "steps": len(trace.measured.steps) - 1,
        "measured_s": trace.measured.step_s,
        "predicted_s": trace.predicted.step_s,
        "off": trace.predicted.step_s / trace.measured.step_s - 1,
        "cost_s": trace.cost_step_s,
        "task_ms": 1000 * mean(lengths) if lengths else 0.0,
        "bubble": [round(trace.predicted.bubble(), 3), round(trace.measured.bubble(), 3)],
        "parts": parts(trace.predicted, trace.measured, trace.stages),
    }


def parts(predicted: Side, measured: Side, stages: int) -> list[str]:
    """A line per stage and per kind of way, each figure as predicted and as measured."""
    lines = []
    for p, m in zip(stage_rows(predicted, stages), stage_rows(measured, stages), strict=True):
        lines.append(
            f"stage {p.stage}: {p.tasks:.1f}, {m.tasks:.1f} tasks a step; forward {1e3 * p.forward_s:.0f},"
            f" {1e3 * m.forward_s:.0f} ms; backward {1e3 * p.backward_s:.0f}, {1e3 * m.backward_s:.0f} ms;"
            f" busy {p.busy:.0%}, {m.busy:.0%}"
        )
    known = {row.name: row for row in link_rows(predicted)}
    for row in link_rows(measured):
        guess = known.get(row.name)
        carried = "nothing" if guess is None else f"{guess.megabytes:.2f} MB at {guess.rate / 1e6:.2f} MB/s"
        lines.append(f"{row.name}: {carried}, {row.megabytes:.2f} MB at {row.rate / 1e6:.2f} MB/s")
    return lines


def run_case(case: Case, steps: int, patience_s: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="predicted-"))
    try:
        with running(case, folder) as run, run.last_words():
            run.steps(1, patience_s)
            run.free()
            run.steps(3, patience_s)
            if case.is_planned_again:
                run.plan_again(patience_s)
            began = time.monotonic()
            run.steps(steps, patience_s)
            row = {"name": case.name, **measure(run, time.monotonic() - began)}
            if case.joins:
                for line in case.joins:
                    run.join(*line, case.all_shares()[-1])
                _until(lambda: len([m for m in run.ask("status")["members"] if m["role"] == "volunteer"])
                       >= len(case.volunteers) + len(case.joins), patience_s)  # fmt: skip
                run.steps(1, patience_s)
                run.free()
                began = time.monotonic()
                run.steps(steps, patience_s)
                first = measure(run, time.monotonic() - began)
                began = time.monotonic()
                run.steps(steps, patience_s)
                row |= {"joining_s": first["measured_s"], "joined": measure(run, time.monotonic() - began)}
                row["costs"] = row["joined"]["measured_s"] / row["measured_s"] - 1
            row["plan"] = run.ask("status")["plan"]
            return row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Runs what is missing, then prints all rows; 1 where something that was to be shown does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", help="the case of this name alone")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--patience-s", type=float, default=240.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as at Ctrl-C: nothing is left behind
    rows = json.loads(arguments.file.read_text()) if arguments.file.exists() else []
    for case in CASES:
        if any(row["name"] == case.name for row in rows) or arguments.only not in (None, case.name):
            continue
        print(f"{case.name} …", file=sys.stderr, flush=True)
        try:
            rows.append(run_case(case, arguments.steps, arguments.patience_s))
        except (RuntimeError, subprocess.SubprocessError) as error:
            print(f"{case.name}: {error}", file=sys.stderr)
            continue
        arguments.file.write_text(json.dumps(rows, indent=1))
    print("case              steps  measured s  predicted s    off   task ms   bubble predicted, measured")
    for row in rows:
        print(
            f"{row['name']:16} {row['steps']:>6} {row['measured_s']:>11.2f} {row['predicted_s']:>12.2f}"
            f" {row['off']:>+6.1%} {row['task_ms']:>9.0f}   {row['bubble'][0]:.0%}, {row['bubble'][1]:.0%}"
        )
        if "costs" in row:
            print(f"{'':16} with one more, of 2 Mbit/s up: {row['joined']['measured_s']:.2f} s, {row['costs']:+.1%}")
        if abs(row["off"]) > OFF_MAX:
            print(*(f"{'':16} {line}" for line in row.get("parts", ())), sep="\n")
    bad = missed(rows)
    print(*bad, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

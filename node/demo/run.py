"""Runs a demo: starts the processes, looks at the coordinator's status, breaks what was asked for, sums up.

A synchronous loop in the main thread: it starts and ends processes and reads HTTP on loopback, nothing more. The
processes are the ordinary commands; the demo knows nothing that a person at the keyboard could not know.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from node.audit import AuditError, audit
from node.data.allowed import named_paths
from node.data.dataset import Dataset
from node.data.sources import BUILTIN_PYTHON
from node.demo.chaos import Plan
from node.demo.finish import summary, train_without_machinery, write_summary
from node.demo.options import DemoOptions, to_toml, with_checkpoints
from node.demo.processes import Child, Children
from node.demo.status import Tally, fetch_status, held_work
from node.demo.view import LiveView, PlainView, View
from protocol.drive.folders import check_writable
from protocol.drive.process import free_port
from protocol.run.run import RunConfig

LOOK_S = 0.2
"""Seconds between looks at the coordinator's status."""
START_S = 60.0
"""How long the coordinator may take until its links are there."""
STALL_S = 180.0
"""Without a new step for so long the demo gives up, and says what everybody waits for."""
LEAVE_S = 30.0
"""After the last step nodes leave by themselves within this time."""


class DemoError(Exception):
    """The demo cannot go on; the sentence says why."""


def run_demo(options: DemoOptions) -> int:
    """Runs a demo to its end; returns the exit code."""
    config = options.run()
    changes = options.changes_made(config)
    model = options.out / "model"
    check_writable("--out", options.out, model)
    if options.summary is not None:
        check_writable("--summary", options.summary, options.summary.parent)
    if options.state is not None and not options.reference:
        check_writable("--state", options.state, options.state)
    if config.data.source != BUILTIN_PYTHON:  # that one is there; of all others a server would find out late
        Dataset(config)
    if options.reference:
        view = _view(options, config)
        started = time.monotonic()
        with view:
            content = train_without_machinery(
                config,
                model,
                options.threads,
                options.device,
                lambda step, loss: view.step(
                    step, loss, (step + 1) * config.step_tokens / (time.monotonic() - started)
                ),
                changes,
            )
        _tell(content, options)
        return 0
    state = options.state or Path(tempfile.mkdtemp(prefix="barnraise-demo-"))
    demo = _Demo(options, config, state.absolute())
    try:
        with demo.interruptible():
            content = demo.run(model)
    except DemoError as error:
        click.echo(f"{error}\nlogs and state: {state}", err=True)
        return 1
    except KeyboardInterrupt:
        if options.state is None:  # nobody asked to keep it, and nobody would find it
            shutil.rmtree(state, ignore_errors=True)
        raise
    if options.state is None:
        shutil.rmtree(state, ignore_errors=True)
    _tell(content, options)
    return 0 if content["samples_lost"] == content["samples_doubled"] == 0 else 1


def _view(options: DemoOptions, config: RunConfig) -> View:
    terminal = sys.stdout.isatty()
    if terminal and not options.plain and "NO_COLOR" not in os.environ:
        return LiveView(config, Console())
    return PlainView(config, sparse=not terminal and not options.plain)


def _tell(content: dict[str, Any], options: DemoOptions) -> None:
    losses = content["losses"]
    moved = sum(content["bytes"].values()) / 1e6
    validated = list(content["validations"].values())
    aside = f" (validation {validated[0]:.2f} -> {validated[-1]:.2f})" if validated else ""
    click.echo(
        f"done  {content['steps']} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f}{aside}, "
        f"{content['tokens_per_second']:,.0f} tokens/s, {content['kills']} kills, "
        f"{content['reissued']} tasks re-issued, "
        f"{content['samples_lost']} samples lost, {content['samples_doubled']} doubled, {moved:,.0f} MB moved"
    )
    if content["model"]:
        click.echo(f"saved {content['model']} (Hugging Face format; README.md shows how to load it)")
    if options.summary is not None:
        write_summary(options.summary, content)


class _Demo:
    """One demo with its processes."""

    def __init__(self, options: DemoOptions, config: RunConfig, state: Path) -> None:
        self._options = options
        self._config = with_checkpoints(config, state / "checkpoints")
        self._state = state
        self._tally = Tally()
        self._plan = Plan(options, random.Random(config.seed))
        self._view = _view(options, self._config)
        self._children = Children()
        self._coordinator: Child
        self._servers: list[Child] = []
        self._volunteers: dict[str, tuple[Child, int]] = {}
        """Those that were not killed, with the port of their metrics, by name."""
        self._volunteer_count = 0
        self._http = ""
        self._links: dict[str, Any] = {}
        self._seen = -1
        """Newest step that was shown."""
        self._first_seen: tuple[int, float] | None = None
        self._last_seen = 0.0
        self._waits_told = ""
        self._validations: dict[int, float] = {}
        """By version, as the coordinator tells them."""
        self._interrupted = False
        self.kills = 0

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends the demo even where Python drops the exception: one in a destructor is only printed."""

        def note(*_: object) -> None:
            self._interrupted = True
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _rest(self) -> None:
        time.sleep(LOOK_S)
        if self._interrupted:
            raise KeyboardInterrupt

    def run(self, model: Path) -> dict[str, Any]:
        """From the first process to the summary."""
        with self._children, self._view:
            self._start()
            self._follow()
            self._wait_for_ends()
        return self._sum_up(model)

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._state.mkdir(parents=True, exist_ok=True)
        toml = self._state / "RUN.toml"
        text = to_toml(self._config)
        if toml.exists() and toml.read_text() != text:
            raise DemoError(f"{self._state} holds another demo; name another folder with --state, or remove it")
        toml.write_text(text)
        folder = self._state / "coordinator"
        # Ports are chosen here, so that a coordinator that is killed comes back where everybody looks for it.
        arguments = ["coordinator", str(toml), "--state", str(folder), "--metrics", "127.0.0.1:0"]
        arguments += ["--listen", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{free_port()}"]
        self._coordinator = self._children.start("coordinator", folder, arguments)
        self._links = self._wait_for_links(folder / "links.json")
        self._http = self._links["http"]
        checkpoints = self._state / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        for index in range(self._options.server_count(self._config)):
            name = f"server-{index + 1}"
            home = self._state / name
            arguments = ["server", str(folder / "server.link"), "--state", str(home), "--listen", "127.0.0.1:0"]
            arguments += ["--checkpoints", str(checkpoints), "--device", str(self._options.device)]
            for path in named_paths(self._config):  # whoever starts the demo has named them
                arguments += ["--data", path]
            self._servers.append(self._children.start(name, home, arguments))
        for _ in range(self._options.volunteers):
            self._start_volunteer()
        self._view.news(
            f"coordinator at {self._http}, {len(self._servers)} servers, {self._options.volunteers} volunteers; "
            "nothing leaves this machine"
        )

    def _wait_for_links(self, path: Path) -> dict[str, Any]:
        """What the coordinator of this very start has written down."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if not self._coordinator.running:
                raise DemoError(f"the coordinator ended at once:\n{self._coordinator.log_tail()}")
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if found["pid"] == self._coordinator.pid:
                    return found
            time.sleep(0.05)
        raise DemoError(f"the coordinator has not written its links within {START_S:.0f} s")

    def _start_volunteer(self) -> str:
        self._volunteer_count += 1
        name = f"volunteer-{self._volunteer_count}"
        home, port = self._state / name, free_port()
        link = self._state / "coordinator" / "volunteer.link"
        arguments = ["join", str(link), "--state", str(home), "--yes", "--always", "--no-page", "--no-benchmark"]
        arguments += ["--metrics", f"127.0.0.1:{port}", "--device", str(self._options.device)]
        self._volunteers[name] = (self._children.start(name, home, arguments), port)
        return name

    # ---- following ---------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Until the last step is closed and its checkpoint written."""
        self._last_seen = time.monotonic()
        while True:
            status = fetch_status(self._http)
            if status is not None:
                self._tally.take(status)
                self._show(status)
                self._settle(status)
                if status["run"]["state"] == "finished":
                    if self._plan.spared_all(self._seen):  # before the last step: after it nobody holds anything
                        self._view.news("nobody was killed (--chaos): no volunteer held work when it was looked at")
                    return
            self._break_things()
            self._check_children()
            stalled_s = time.monotonic() - self._last_seen
            if stalled_s > STALL_S:
                raise DemoError(f"no step was closed for {stalled_s:.0f} s: {self._reasons(status)}")
            self._rest()

    def _settle(self, status: dict[str, Any]) -> None:
        """What was open in the run is filled in with the first plan, and shown with its reason."""
        if self._config.is_open and status["stages"]:
            stages = msgspec.structs.replace(
                self._config.stages, count=status["run"]["stages"], cut=status["run"]["cut"]
            )
            self._config = msgspec.structs.replace(self._config, stages=stages)
            self._view.news(status["plan"])

    def _show(self, status: dict[str, Any]) -> None:
        now = time.monotonic()
        for row in status["losses"]:
            if row["step"] > self._seen:
                self._seen = row["step"]
                self._last_seen = now
                if self._first_seen is None or self._first_seen[1] == now:
                    self._first_seen = (row["step"], now)  # steps that are seen together have no speed
                self._view.step(row["step"], row["loss"], self._speed())
        running = sum(child.running for child, _ in self._volunteers.values())
        for found in status["validations"]:
            if found["version"] not in self._validations and found["loss"] is not None:
                self._validations[found["version"]] = found["loss"]
                self._view.news(f"validation loss {found['loss']:.4f} after {found['version']} steps")
        self._view.status(status, running)
        waits = status["run"]["waiting_for"]
        if waits != self._waits_told:
            self._waits_told = waits
            if waits:
                self._view.news(waits)

    def _speed(self) -> float:
        """Tokens per second from the first closed step that was seen to the newest one."""
        if self._first_seen is None or self._last_seen <= self._first_seen[1]:
            return 0.0
        step, at = self._first_seen
        return (self._seen - step) * self._config.step_tokens / (self._last_seen - at)

    def _reasons(self, status: dict[str, Any] | None) -> str:
        if status is None:
            return "the coordinator does not answer"
        waits = [status["run"]["waiting_for"]]
        waits += [f"{member['place']}: {member['waiting_for']}" for member in status["members"]]
        return "; ".join(wait for wait in waits if wait) or "nobody says what for"

    def _check_children(self) -> None:
        for child in (self._coordinator, *self._servers, *(child for child, _ in self._volunteers.values())):
            code = child.process.poll()
            if code is not None and code != 0:
                raise DemoError(f"{child.name} ended with code {code}:\n{child.log_tail()}")

    # ---- breaking ----------------------------------------------------------------------------------------------------

    def _break_things(self) -> None:
        options, plan, closed = self._options, self._plan, self._seen + 1
        if plan.volunteer_due(closed):
            self._kill_a_volunteer()
        if plan.due("coordinator", options.kill_coordinator, closed):
            self._view.news(f"coordinator killed on purpose after step {closed}; the servers go on without it")
            self._children.kill(self._coordinator)
            self.kills += 1
            self._coordinator = self._children.again(self._coordinator)
        if plan.due("server", options.kill_server, closed):
            index = plan.rng.randrange(len(self._servers))
            self._view.news(f"{self._servers[index].name} killed on purpose after step {closed}; started again")
            self._children.kill(self._servers[index])
            self.kills += 1
            self._servers[index] = self._children.again(self._servers[index])
        if plan.due("volunteers", options.kill_all_volunteers, closed):
            self._view.news(f"all volunteers killed on purpose after step {closed}; none is started again")
            for child, _ in self._volunteers.values():
                self._children.kill(child)
                self.kills += 1
            self._volunteers.clear()

    def _kill_a_volunteer(self) -> None:
        """Kills one that holds a lease or an unsent contribution right now; if none does, at the next look."""
        names = list(self._volunteers)
        self._plan.rng.shuffle(names)
        for name in names:
            child, port = self._volunteers[name]
            held = held_work(port)
            if held:
                self._children.kill(child)
                del self._volunteers[name]
                self._plan.volunteer_kills += 1
                self.kills += 1
                fresh = self._start_volunteer()
                tasks = f"{held} task{'' if held == 1 else 's'}"
                self._view.news(f"{name} killed on purpose with {tasks} in hand (--chaos); {fresh} joins")
                return

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _wait_for_ends(self) -> None:
        """The run is finished: nodes leave by themselves; the coordinator stays until it is asked."""
        deadline = time.monotonic() + LEAVE_S
        nodes = [*self._servers, *(child for child, _ in self._volunteers.values())]
        while any(child.running for child in nodes) and time.monotonic() < deadline:
            status = fetch_status(self._http)
            if status is not None:
                self._tally.take(status)
            self._rest()
        late = [child.name for child in self._servers if child.running]
        if late:
            raise DemoError(f"the run is finished, but {', '.join(late)} did not leave within {LEAVE_S:.0f} s")

    def _sum_up(self, model: Path) -> dict[str, Any]:
        # Only now: the demo itself starts without torch.
        from node.compute.checkpoint import run_folder
        from node.compute.export_checkpoint import export_checkpoint

        try:
            verdict = audit([child.folder for child in self._servers], self._config.steps)
        except AuditError as error:
            raise DemoError(f"the journals cannot be audited: {error}") from error
        for finding in verdict.findings[:10]:
            click.echo(f"step {finding.step} stage {finding.stage}: {finding.sentence}", err=True)
        export_checkpoint(run_folder(self._state / "checkpoints", self._config), self._config.steps, model)
        return summary(
            self._config,
            [verdict.losses[step] for step in sorted(verdict.losses)],
            self._speed(),
            model,
            kills=self.kills,
            reissued=int(self._tally.total("reissued")),
            samples_lost=verdict.samples_lost,
            samples_doubled=verdict.samples_doubled,
            moved=self._tally.by_prefix("bytes_tx_"),
            validations=self._validations,
            seconds={name: self._tally.total(name) for name in ("compute_s", "codec_s", "optimizer_s", "input_wait_s")},
        )

"""A real Prometheus on loopback, for the time of a test: Debian's package `prometheus`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.monitoring.files import monitoring_files, rules_file
from coordinator.monitoring.rules import Alert, Thresholds
from protocol.drive.process import free_port
from tests.integration.swarm import eventually, fetch


class Prometheus:
    """What a test asks of it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API; an error is the test's."""
        try:
            text = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return json.loads(text)["data"]

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        found = self.ask("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def up(self) -> dict[str, int]:
        """Daemons that answer, by role."""
        return {labels["role"]: int(value) for labels, value in self.values("sum by (role) (up)")}

    def firing(self) -> set[str]:
        return {labels["alertname"] for labels, _ in self.values('ALERTS{alertstate="firing"}')}

    def _fires(self, name: str) -> bool:
        return name in self.firing()

    def _is_quiet(self, name: str) -> bool:
        return name not in self.firing()

    def fires(self, *names: str) -> None:
        """Waits until all of these fire."""
        for name in names:
            eventually(partial(self._fires, name), name)

    def is_quiet(self, *names: str) -> None:
        """Waits until none of these fires."""
        for name in names:
            eventually(partial(self._is_quiet, name), f"the end of {name}")


@contextmanager
def prometheus(
    folder: Path,
    coordinator: str,
    limits: Thresholds,
    hold: Callable[[Alert], float],
    rules: str = "",
    states: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Runs it on the files that `barnraise monitoring write` writes, but every second and with shorter rules: those of
    `limits` and `hold`, or `rules` as they stand. `states`: state folders of nodes of this computer, as an owner who
    watches his own names them: a volunteer that pauses has left the run, which then lists it no more."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed, so NOTHING is scraped here: ./deploy/test-deps installs it")
    for name, text in monitoring_files([coordinator], states).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    config = folder / "prometheus.yml"
    config.write_text(re.sub(r"(interval: )15s", r"\g<1>1s", config.read_text()))
    (folder / "rules.yml").write_text(rules or rules_file(limits, hold))
    port = free_port()
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", f"--web.console.templates={folder / 'consoles'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            found = Prometheus(f"http://127.0.0.1:{port}")
            eventually(lambda: _ready(found, process, folder / "log"), "Prometheus")
            yield found
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        return "Ready" in fetch(f"{found.url}/-/ready")
    except OSError:
        return False

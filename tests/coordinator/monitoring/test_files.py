"""What `barnraise monitoring write` writes holds together: expressions, names, dashboards, both ways."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.monitoring.dashboards import dashboards
from coordinator.monitoring.files import monitoring_files
from coordinator.monitoring.grafana import to_json
from coordinator.monitoring.rules import RECORDINGS
from protocol.cli import main
from tests.coordinator.monitoring.expressions import FOREIGN, expressions, families, filled_in, names_in

UNUSED: dict[str, str] = {}
"""Families that no rule, dashboard or console reads, each with the reason why it is exported."""
UNITS = {
    "_seconds": {"s"}, "_bytes": {"bytes"}, "_ratio": {"percentunit"}, "_timestamp_seconds": {"s"},
    "_bytes_per_second": {"Bps"},
}  # fmt: skip
"""What a gauge's ending says of the panel's unit, where nothing is done to it but choosing and summing."""


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed, so NO expression is parsed here: ./deploy/test-deps installs it")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_writes_files_that_prometheus_takes(tmp_path: Path) -> None:
    """Configuration and rules pass promtool; a second time replaces them; the text says what to do next."""
    for _ in range(2):
        done = CliRunner().invoke(
            main, ["monitoring", "write", str(tmp_path), "http://127.0.0.1:1", "https://b.example"]
        )
        assert done.exit_code == 0, done.output
    assert "promtool check config" in done.output and "docker compose up" in done.output
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    text = (tmp_path / "prometheus.yml").read_text()
    assert '"http://127.0.0.1:1/api/sd"' in text and '"https://b.example/api/sd"' in text
    here = CliRunner().invoke(main, ["monitoring", "write", str(tmp_path), "--here", str(tmp_path / "state")])
    assert here.exit_code == 0 and str(tmp_path / "state" / "metrics.json") in (tmp_path / "prometheus.yml").read_text()
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    # A container sees no state folder, and may not look into one: nobody is sent that way.
    assert "docker compose" not in here.output and "as yourself prometheus --config.file=" in here.output


def test_a_star_stands_for_the_folders_that_are_there(tmp_path: Path) -> None:
    """Prometheus takes none in a folder's name, and ended with an error before it had begun."""
    for name in ("one", "two"):
        (tmp_path / "state" / name / "volunteer").mkdir(parents=True)
    (tmp_path / "state" / "two" / "volunteer" / "device-2").mkdir()
    places = str(tmp_path / "state" / "*" / "volunteer")
    done = CliRunner().invoke(main, ["monitoring", "write", str(tmp_path), "--here", places])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "prometheus.yml").read_text()
    assert "*" not in text
    assert all(str(tmp_path / "state" / name / "volunteer" / "metrics.json") in text for name in ("one", "two"))
    assert str(tmp_path / "state" / "two" / "volunteer" / "device-2" / "metrics.json") in text, "its second card's"
    none = CliRunner().invoke(main, ["monitoring", "write", str(tmp_path), "--here", str(tmp_path / "no*")])
    assert none.exit_code == 2 and none.output == f"--here: there is no folder {tmp_path}/no*\n"
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_the_lines_that_are_printed_can_be_copied_and_open_nothing(tmp_path: Path) -> None:
    """A path with a space is one word; and Prometheus, which answers everybody unless told, keeps to loopback."""
    folder = tmp_path / "my run"
    done = CliRunner().invoke(main, ["monitoring", "write", str(folder)])
    lines = [shlex.split(line) for line in done.output.splitlines() if re.match("  (check|start) ", line)]
    assert lines[0] == ["check", "promtool", "check", "config", f"{folder}/prometheus.yml"]
    assert f"--config.file={folder}/prometheus.yml" in lines[1]
    assert "--web.listen-address=127.0.0.1:9090" in lines[1]


def test_what_cannot_be_a_coordinator_or_a_folder_is_said_in_a_sentence(tmp_path: Path) -> None:
    """Exit code 2, and nothing is written."""
    done = CliRunner().invoke(main, ["monitoring", "write", str(tmp_path / "a"), "127.0.0.1:8470"])
    assert done.exit_code == 2 and "127.0.0.1:8470" in done.output and not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["monitoring", "write", str(tmp_path / "file" / "b")])
    assert done.exit_code == 2 and "cannot be written" in done.output


def test_every_expression_parses(tmp_path: Path) -> None:
    """As rules of a file that promtool checks, with Grafana's variables filled in."""
    rules = [
        {"record": f"parsed:{number}".replace(":", "_x"), "expr": filled_in(expression)}
        for number, expression in enumerate(expressions().values())
    ]
    (tmp_path / "all.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", str(tmp_path / "all.yml"))


def test_every_series_that_is_read_is_exported() -> None:
    """By a daemon, by a recording rule, or by Prometheus."""
    known = {*families(), *FOREIGN, *(rule.name for rule in RECORDINGS)}
    unknown = {where: names_in(expression) - known for where, expression in expressions().items()}
    assert {where: names for where, names in unknown.items() if names} == {}
    assert names_in('sum by (barnraise_x) (rate(barnraise_run_loss{a="barnraise_y"}[5m]))') == {"barnraise_run_loss"}


def test_every_family_that_is_exported_is_read_or_excused() -> None:
    """The reverse: nothing is counted that nobody looks at, unless a reason stands beside it."""
    read = set().union(*(names_in(expression) for expression in expressions().values()))
    assert set(families()) - read == set(UNUSED)


def test_labels_that_expressions_choose_by_exist() -> None:
    """A matcher on a label that a family lacks would match nothing, for ever; a value not on the list as well."""
    own = {"job", "instance", "role", "le", "alertstate"}
    for where, expression in expressions().items():
        for name, matchers in re.findall(r"\b(barnraise_[a-z0-9_]+)\{([^}]*)\}", expression):
            base = name if name in families() else name.rpartition("_")[0]
            labels = families()[base].labels
            for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
                assert label in labels or label in own, f"{where}: {name} has no label {label}"
                allowed = labels.get(label)
                if allowed is not None and "$" not in value:
                    for choice in value.split("|") if "~" in operator else [value]:
                        assert choice in allowed, f"{where}: {name}: {label} is never {choice!r}"


@pytest.mark.parametrize("dashboard", [to_json(board) for board in dashboards()], ids=lambda board: str(board["uid"]))
def test_dashboards_are_what_grafana_takes(dashboard: dict[str, Any]) -> None:
    """Fixed uid and no id, unique panel ids, no overlap within 24 columns, the data source by its variable, titles,
    descriptions and units everywhere, rates over the interval that Grafana chooses."""
    assert "id" not in dashboard and re.fullmatch(r"[a-z-]{1,40}", dashboard["uid"])
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names[:2] == ["datasource", "job"]
    panels = dashboard["panels"]
    assert max(Counter(panel["id"] for panel in panels).values()) == 1
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            text = target["expr"]
            used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval"}
            assert used <= set(names), f"{panel['title']}: {used - set(names)}"
            assert used, f"{panel['title']}: {text} asks every job's daemons"
            for window in re.findall(r"rate\([^[]*\[([^\]]+)\]", text):
                assert window == "$__rate_interval", f"{panel['title']}: {text}"
            assert target["legendFormat"]


def test_units_agree_with_what_the_names_say() -> None:
    """A gauge that ends in _bytes is shown in bytes."""
    for dashboard in dashboards():
        for panel in dashboard.panels():
            for query in panel.queries:
                plain = re.fullmatch(
                    r"(?:\w+(?: by \([^)]*\))? ?\()?(barnraise_[a-z0-9_]+)\{[^}]*\}\)?", query.expression
                )
                if plain is None:
                    continue
                ending = max((end for end in UNITS if plain[1].endswith(end)), key=len, default="")
                if ending:
                    assert panel.unit in UNITS[ending], f"{panel.title}: {plain[1]} as {panel.unit}"


def test_every_dashboard_is_a_file_and_all_json_is_json() -> None:
    """Five of them; the compose file mounts what is written."""
    files = monitoring_files(["http://127.0.0.1:8470"])
    boards = [json.loads(text) for name, text in files.items() if name.startswith("dashboards/")]
    assert sorted(board["title"].rpartition("/ ")[2] for board in boards) == [
        "Node",
        "Run",
        "Servers",
        "Swarm",
        "Transport",
    ]
    for mounted in re.findall(r"- \./([\w./]+):", files["compose.yml"]):
        assert any(name.startswith(mounted) for name in files), mounted

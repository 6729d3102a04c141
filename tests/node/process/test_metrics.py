"""The node's metrics: names that Prometheus likes, series that exist from the start, labels that are lists."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from node.process.metrics import NODE_FAMILIES, SERVER_FAMILIES, NodeMetrics
from protocol.base.machine import Count

RUN_LABEL = (("outcome", "applied"), ("run", "tiny"))


@pytest.mark.parametrize("role", ["server", "volunteer"])
def test_promtool_has_no_complaint(role: str) -> None:
    """`promtool check metrics` (Debian package prometheus; ./deploy/test-deps) accepts every family."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: ./deploy/test-deps")
    metrics = NodeMetrics(role)
    metrics.set_run("tiny")
    text = generate_latest(metrics.registry)
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_series_of_the_run_exist_from_its_name_on() -> None:
    """Before the welcome there is no run to name; after it every outcome shows 0."""
    metrics = NodeMetrics("server")
    read = metrics.registry.get_sample_value
    name = "barnraise_server_updates_total"
    assert read(name, dict(RUN_LABEL)) is None
    metrics.set_run("tiny")
    assert read(name, dict(RUN_LABEL)) == 0.0
    metrics.apply(Count(name, 2.0, (("outcome", "applied"),)))
    assert read(name, dict(RUN_LABEL)) == 2.0


def test_a_label_value_that_is_on_no_list_is_our_bug() -> None:
    """Nothing that a peer sends can make a new series."""
    metrics = NodeMetrics("server")
    metrics.set_run("tiny")
    with pytest.raises(KeyError):
        metrics.apply(Count("barnraise_server_updates_total", 1.0, (("outcome", "by-peer-x"),)))
    with pytest.raises(KeyError):
        metrics.apply(Count("barnraise_unheard_of_total"))


def test_a_disk_that_cannot_be_asked_ends_nothing(tmp_path: Path) -> None:
    """A mount that is gone, or a card that has failed: the figure stays what it was."""
    metrics = NodeMetrics("server")
    metrics.set_run("tiny")
    metrics.show_disk(tmp_path)
    metrics.show_disk(tmp_path / "gone")
    free = next(family for family in metrics.registry.collect() if family.name == "barnraise_server_disk_free_bytes")
    assert [sample.value > 0 for sample in free.samples] == [True]
    NodeMetrics("volunteer").show_disk(tmp_path)  # has no such family


def test_no_family_names_a_node_or_an_address() -> None:
    """Who a series is from is Prometheus's own `instance`."""
    for family in (*NODE_FAMILIES, *SERVER_FAMILIES):
        assert not {"node", "peer", "address", "user", "volunteer"} & set(family.labels), family.name

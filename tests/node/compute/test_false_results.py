"""V1: what each kind of false work comes to when an auditor computes it again with torch, and what the ledger says."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.compute.device_performer import DevicePerformer
from node.compute.worker import StageWorker
from tests.benchmarks.blame import MEMBERS, Court
from tests.benchmarks.honest_work import Work
from tests.integration.bad_device import DEEDS, HONEST

pytestmark = pytest.mark.slow

STEPS = 2


@contextmanager
def doing(deed: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All devices that work meanwhile do it; afterwards none does."""
    monkeypatch.setenv(HONEST, "0")
    before = [(owner, dict(vars(owner))) for owner in (StageWorker, DevicePerformer)]
    if deed:
        DEEDS[deed]()
    try:
        yield
    finally:
        for owner, attributes in before:
            for name, value in attributes.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


def outcomes(deed: str, folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int = STEPS) -> dict[str, list[str]]:
    """What the ledger ruled of each contribution, and in what members were found false."""
    options = argparse.Namespace(
        form="default", seed=1, members=",".join(MEMBERS), threads=1, regroup=False, light=False, bf16=False
    )
    (folder / "work").mkdir()
    work = Work(options, folder / "work")
    court = Court("default", 1, folder)
    court.set_up(work.vocabulary)
    found: dict[str, list[str]] = {"ruled": [], "claims": []}
    with doing(deed, monkeypatch):
        worked = [work.step(number) for number in range(steps)]
    for step in worked:
        court.begin(step)
        for made in step.contributions:
            ruling = court.judge(made)
            found["ruled"].append(ruling.outcome)
            found["claims"] += [blame.difference.claim for blame in ruling.blames]
    return found


def test_honest_work_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(outcomes("", tmp_path, monkeypatch)["ruled"]) == {"passed"}


@pytest.mark.parametrize(
    ("deed", "claim"),
    [
        ("flips", "gradient"),
        ("scales", "gradient"),
        ("brings_nothing", "gradient"),
        ("brings_noise", "gradient"),
        ("leaves_out_a_layer", "gradient"),
        ("inflates", "output"),
        ("inflates", "input_gradient"),
        ("backdoors", "gradient"),
        ("claims_losses", "loss"),
        ("computes_coarsely", "output"),
    ],
)
def test_false_work_is_found(deed: str, claim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is false of it, by two opinions."""
    found = outcomes(deed, tmp_path, monkeypatch)
    assert claim in found["claims"], found


def test_old_sums_are_found_where_they_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is right, whoever brings it again is not; and who does so once in ten times is found that once."""
    for deed, steps, count in (("brings_the_first_again", 2, 12 - 3), ("is_lazy", 5, 3)):
        (tmp_path / deed).mkdir()
        found = outcomes(deed, tmp_path / deed, monkeypatch, steps)
        assert found["ruled"].count("blamed") == count, (deed, found)

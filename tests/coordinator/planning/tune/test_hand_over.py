"""What the tuner finds becomes a run file, as far as nodes do it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.commands.plan import plan
from coordinator.planning.tune.case import Choice
from coordinator.planning.tune.hand_over import run_of
from protocol.base.errors import BadInputError
from protocol.run.config_file import load_run, run_example
from protocol.run.run import AuditSection, BatchSection, ModelSection, RunConfig
from tests.coordinator.commands.test_readme_files import EXAMPLES

RUN = RunConfig(
    model=ModelSection(layers=4, hidden=64, heads=2, kv_heads=1, feed_forward=128, context=64),
    batch=BatchSection(microbatches=8, samples=2),
    audit=AuditSection(rate=0.0),
)


def test_every_choice_that_nodes_do_has_its_keys() -> None:
    """Sizes, the cut, the placement, what goes first, segments and the split; all samples of a step stay in it."""
    run = run_of(RUN, Choice(2, 4, "V-shape", "forward first", True, segments=2), [0, 3, 5, 8, 10])
    assert (run.stages.count, run.stages.chunks, run.stages.placement, run.stages.cut) == (2, 2, "v", "3 5 8")
    assert (run.batch.samples, run.batch.microbatches, run.batch.segments) == (4, 4, 2)
    assert run.stages.order == "forward" and run.compute.split_backward
    run = run_of(RUN, Choice(2, 2, "circular", "interleaved 1F1B", False), [0, 3, 5, 8, 10])
    assert (run.stages.placement, run.stages.chunks, run.stages.order) == ("interleaved", 2, "interleaved")
    run = run_of(RUN, Choice(3, 2, "one-to-one", "latency-aware 1F1B", False), [0, 2, 4, 10])
    assert (run.stages.placement, run.stages.cut, run.stages.order) == ("line", "2 4", "backward")


@pytest.mark.parametrize(
    ("choice", "key"),
    [
        (Choice(2, 2, "bidirectional", "interleaved", False), "stages.placement: bidirectional"),
        (Choice(2, 2, "one-to-one", "1F1B", False, slices=2), "batch.samples: microbatches of a run are equal"),
        (Choice(2, 2, "one-to-one", "1F1B", False, segments=100), "batch.segments: 100"),
    ],
)
def test_what_nodes_do_not_do_is_a_sentence_that_names_the_key(choice: Choice, key: str) -> None:
    with pytest.raises(BadInputError, match=f"^{key}"):
        run_of(RUN, choice, [0, 5, 10])


def test_the_command_writes_a_run_file_and_writes_nothing_over(tmp_path: Path) -> None:
    """It can be read as any other; what was faster and cannot be done is said; the second time it is refused."""
    run, network, new = tmp_path / "RUN.toml", tmp_path / "NETWORK.json", tmp_path / "NEW.toml"
    run.write_text(run_example(values=RUN))
    network.write_text(json.dumps(next(example for example in EXAMPLES if example["kind"] == "network")))
    arguments = ["tune", str(run), str(network), "--budget-s", "3", "--segments", "1,2", "--write", str(new)]
    done = CliRunner().invoke(plan, arguments, catch_exceptions=False)
    said = " ".join(done.output.split())
    assert done.exit_code == 0 and "s a step, simulated" in said
    written = load_run(new)
    written.validate()
    assert written.batch.samples * written.batch.microbatches == 16 and f"{written.stages.count} nodes" in said
    with pytest.raises(BadInputError, match="is there already"):
        CliRunner().invoke(plan, arguments, catch_exceptions=False)

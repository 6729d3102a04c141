"""A coordinator that names a run which cannot be, or which this computer cannot hold, is refused in a sentence."""

from __future__ import annotations

import msgspec
import pytest

from node.machine.records import ShardStarted
from node.machine.welcome import why_not
from protocol.messages import Welcome
from protocol.run.run import BatchSection, DataSection, ModelSection, RunConfig, StagesSection

GB = 10**9


def _welcome(config: RunConfig, vocabulary: int = 32_000) -> Welcome:
    return Welcome(membership=b"", config=config, config_hash=config.config_hash(), vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (RunConfig(model=ModelSection(hidden=2**31)), "model.hidden"),
        (RunConfig(batch=BatchSection(samples=2**40)), "batch.samples"),
        (RunConfig(stages=StagesSection(count=-1)), "stages.count"),
        (RunConfig(stages=StagesSection(count=0)), "stages.count"),
        (RunConfig(stages=StagesSection(cut="planned")), "stages.count or stages.cut"),
        (RunConfig(model=ModelSection(rope_theta=float("nan"))), "model.rope_theta"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_made_of_them(config: RunConfig, field: str) -> None:
    """The coordinator checks its own file; whoever pretends to be one does not."""
    assert why_not(_welcome(config), None, [], 0).startswith(f"the run cannot be: {field}")


def test_a_run_that_does_not_fit_into_memory_is_refused_with_both_figures() -> None:
    """Seven billion parameters in two stages: 28 GB of weights and gradients for each."""
    model = ModelSection(layers=32, hidden=4096, heads=32, kv_heads=32, feed_forward=11008, context=2048)
    config = RunConfig(model=model)
    sentence = why_not(_welcome(config), None, [], 8 * GB)
    assert sentence == "one of the run's 2 stages takes 27.0 GB of memory at least, and this computer has 8.0 GB free"
    assert why_not(_welcome(config), None, [], 32 * GB) == ""
    assert why_not(_welcome(config), None, [], 0) == "", "nobody knows how much is free"


def test_another_run_than_the_one_that_was_begun_is_refused() -> None:
    """A changed configuration, and a hash of another one."""
    config, other = RunConfig(), RunConfig(seed=2)
    assert "changed while this node was away" in why_not(_welcome(other), config, [], 0)
    elsewhere = msgspec.structs.replace(config, data=DataSection(source="/data/book.txt"))
    unread = msgspec.structs.replace(_welcome(elsewhere), vocabulary=0)
    assert why_not(unread, config, [], 0, serves=True) == "", "nobody has read the data: their path may be corrected"
    assert "changed while" in why_not(unread, config, [], 0), "a volunteer's owner has agreed to these"
    read = msgspec.structs.replace(unread, vocabulary=259)
    assert "changed while" in why_not(read, config, [], 0, serves=True)
    forged = msgspec.structs.replace(_welcome(config), config_hash=other.config_hash())
    assert "does not have the hash" in why_not(forged, None, [], 0)


def test_a_server_waits_with_an_open_run_and_takes_it_filled_in_and_nothing_else() -> None:
    """Servers are there before the plan; what was open may be filled in once, and no other key may change with it."""
    open_run = RunConfig(stages=StagesSection(count=0, cut="planned"))
    settled = open_run.settled(2, (3,))
    assert (settled.stages.count, settled.stages.cut) == (2, "3") and not settled.is_open
    assert why_not(_welcome(open_run), None, [], 0, serves=True) == ""
    assert why_not(_welcome(settled), open_run, [], 0, serves=True) == ""
    other = msgspec.structs.replace(settled, steps=settled.steps + 1)
    assert "changed while this node was away" in why_not(_welcome(other), open_run, [], 0, serves=True)
    assert "changed while this node was away" in why_not(_welcome(open_run.settled(3)), settled, [], 0, serves=True)
    assert open_run.settled(2, (5,)) == open_run.settled(2), "an even cut has one form, and so one hash"


def test_the_state_of_an_older_build_is_the_same_run() -> None:
    """Its journal has the hash that it gave the run; another run's state is refused as ever."""
    config = RunConfig()
    for called in config.hashes():
        assert why_not(_welcome(config), None, [_started(called)], 0) == ""
        assert why_not(msgspec.structs.replace(_welcome(config), config_hash=called), None, [], 0) == ""
    assert len(config.hashes()) == 6, "this build's, and five that older builds gave it"
    for called in RunConfig(seed=2).hashes():
        assert "belongs to another configuration" in why_not(_welcome(config), None, [_started(called)], 0)


def _started(called: bytes) -> ShardStarted:
    return ShardStarted(
        ledger_generation=1, step=0, stage=0, shard=0, shard_count=1, checkpoint_step=-1, config_hash=called
    )

"""Whether a node takes part in the run that it is welcomed to: what can be seen of a run is looked at, not believed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from node.machine.records import Record, ShardStarted
from protocol.base.errors import BadInputError
from protocol.messages import Welcome
from protocol.run.changes import check_changes, running
from protocol.run.course import is_asked_for
from protocol.run.model_spec import ModelSpec
from protocol.run.plan import Plan
from protocol.run.run import RunConfig

STAGE_BYTES_PER_PARAMETER = 8
"""fp32 weights and fp32 gradients: the least that anybody of a stage holds. An average stage of four of a model of one
billion parameters takes 2 GB, of seven billion 14 GB; activations and optimizer state come on top."""


def why_not(
    message: Welcome, known: RunConfig | None, records: Sequence[Record], memory_bytes: int, serves: bool = False
) -> str:
    """A sentence why this node refuses, or nothing.

    Args:
        known: the run as this process knows it already.
        records: what the state folder holds. Where no ledgers have begun and nobody has read the data, the operator may
            still correct where they lie: nothing has been computed by them.
        memory_bytes: free on this computer; 0: not known.
        serves: whether this is a server, which is there before the run is planned.
    """
    config = message.config
    if not config.has_hash(message.config_hash):
        return "the run's configuration does not have the hash that came with it"
    try:
        config.validate()
    except BadInputError as error:
        return f"the run cannot be: {error}"
    if config.is_open and not serves:
        return "the run cannot be: stages.count or stages.cut is still open, and nobody computes before that is planned"
    if serves and known is not None and known.settles(config):
        return ""  # a coordinator that has lost its database, and hears from us how the run was cut
    starts = [record for record in records if isinstance(record, ShardStarted)]
    nothing_yet = serves and not message.vocabulary and not starts
    changed = known is not None and known.config_hash() != config.config_hash() and not config.settles(known)
    if changed and not (nothing_yet and known is not None and names_other_data(known, config)):
        return "the run's configuration changed while this node was away"
    if starts and not config.has_hash(starts[-1].config_hash):
        return "this state folder belongs to another configuration of the run"
    parameters = ModelSpec.of_run(config.model, max(1, message.vocabulary)).parameters
    needed = STAGE_BYTES_PER_PARAMETER * parameters // config.stages.count if config.stages.count else 0
    if 0 < memory_bytes < needed:
        return (
            f"one of the run's {config.stages.count} stages takes {needed / 1e9:.1f} GB of memory at least, and this"
            f" computer has {memory_bytes / 1e9:.1f} GB free"
        )
    return ""


def names_other_data(known: RunConfig, config: RunConfig) -> bool:
    """Whether a run differs from what it was in nothing but the data that it names."""
    validation = msgspec.structs.replace(known.validation, source=config.validation.source)
    corrected = msgspec.structs.replace(known, data=config.data, validation=validation)
    return known != config and corrected.config_hash() == config.config_hash()


def why_no_plan(plan: Plan, config: RunConfig) -> str:
    """A sentence why this node refuses a plan of the run that it knows, or nothing."""
    try:
        check_changes(config, plan.changes)
        now = running(config, plan.changes)
    except BadInputError as error:
        return f"the plan changes the run in a way that cannot be: {error}"
    if not is_asked_for(plan.course, now):
        return "the plan's routes are not what the run's configuration asks for"
    return ""

"""Messages about a checkpoint: each shard's part of it, and that it is whole."""

from __future__ import annotations

from protocol.base.bounded import Bytes, Number, Text
from protocol.base.message import Work


class CheckpointPart(Work, frozen=True, kw_only=True):
    """Shard to decider: the shard's file of a checkpoint is durable."""

    step: Number
    stage: Number
    shard: Number
    file: Text
    byte_count: Number
    digest: Bytes


class CheckpointDone(Work, frozen=True, kw_only=True):
    """Decider to all servers: the manifest of a checkpoint is durable, so they can name it when they join."""

    step: Number

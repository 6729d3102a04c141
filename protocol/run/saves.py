"""Messages about what is saved: each shard's part of a checkpoint, that it is whole, and copies at buddies."""

from __future__ import annotations

from protocol.base.bounded import Bytes, Number, Tensors, Text
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


class ShardCopy(Work, frozen=True, kw_only=True):
    """Shard to its buddy: a piece of the state of a version that it has committed. The pieces come in order, each when
    the one before is kept."""

    stage: Number
    shard: Number
    version: Number
    piece: Number
    pieces: Number
    digest: Bytes
    """Of the whole state, by the shard itself; who starts from the copy compares."""
    tensors: Tensors


class CopyKept(Work, frozen=True, kw_only=True):
    """Buddy to shard: it holds this piece; with the last one, a version is safe there."""

    version: Number
    piece: Number


class FetchCopy(Work, frozen=True, kw_only=True):
    """A server that has nothing of its shard, to its buddy: asks for a piece of what was copied. Piece -1: what came of
    it is not what its digest says, so the copy is of no use to anybody."""

    stage: Number
    shard: Number
    version: Number
    piece: Number


class CopyGiven(Work, frozen=True, kw_only=True):
    """Answers `FetchCopy`; no tensor and no pieces: that version is not held."""

    version: Number
    piece: Number
    pieces: Number
    digest: Bytes
    tensors: Tensors

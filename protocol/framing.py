"""Frames on an established record stream (interface; the code follows in the next commits)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.messages import Message

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class MessageArrived:
    """A message with all its tensors: `buffers[i]` holds the wire form of `message.tensors[i]` (key == i)."""

    message: Message
    buffers: tuple[bytearray, ...]
    byte_count: int
    """Bytes to give back with `release` when the receiver is done with the message (0 without tensors)."""


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The peer ended the stream cleanly (TAG_FINAL); everything it sent has been delivered."""


class Framing:
    """Messages in, records out, and the reverse; no clock, no socket."""

    def send(self, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Queue a message. `buffers[i]` is the wire form of `message.tensors[i]`, not copied: leave it unchanged."""
        raise NotImplementedError

    def data_to_send(self, budget: int) -> list[bytes]:
        """Encrypted records of at most about `budget` bytes, control first; empty when there is nothing (yet)."""
        raise NotImplementedError

    def receive(self, data: Buffer) -> list[MessageArrived | PeerClosed]:
        """Feed bytes of the stream. Raises `RemoteProtocolError`; the stream is dead after that."""
        raise NotImplementedError

    def release(self, byte_count: int) -> None:
        """The receiver is done with that many tensor bytes: the peer may send as many again."""
        raise NotImplementedError

    def close(self) -> None:
        """After what is queued without tensors, end the stream with TAG_FINAL."""
        raise NotImplementedError

    def queued_bytes(self) -> int:
        """Bytes of messages and tensors that wait to be sent."""
        raise NotImplementedError


_ = Any

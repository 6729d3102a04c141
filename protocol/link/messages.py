"""Messages that measure a link: questions of so many bytes, and their answers."""

from __future__ import annotations

from protocol.base.ids import TensorRef
from protocol.base.message import Message


class MeasureAsk(Message, frozen=True, kw_only=True):
    """Asks for `byte_count` bytes in a `MeasureData` with the same number; 0 asks for a `MeasureGot` only."""

    number: int
    byte_count: int


class MeasureData(Message, frozen=True, kw_only=True):
    """Bytes without meaning. `answers` says whether they were asked for; if not, a `MeasureGot` goes back."""

    number: int
    answers: bool
    tensors: tuple[TensorRef, ...]


class MeasureGot(Message, frozen=True, kw_only=True):
    """Answers a `MeasureAsk` of 0 bytes or a `MeasureData`; `refused`: no more is measured for now."""

    number: int
    refused: bool

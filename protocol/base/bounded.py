"""Types of fields that cross the wire, each with its bound: the decoder refuses what is beyond before it is built.

Every field of a message, and of what a message holds, has one of these types, one with a bound of its own, or one that
can hold no more than a few values (a test). `protocol.link.fields` checks what types cannot say.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from msgspec import Meta

from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef, Ticket
from protocol.base.limits import (
    ADDRESSES_MAX,
    BYTES_MAX,
    CONTRIBUTIONS_MAX,
    ITEMS_MAX,
    NUMBER_MAX,
    PATH_MAX,
    PUBLIC_NAME_MAX,
    REPORT_COUNTERS,
    TASKS_MAX,
    TENSORS_MAX,
    TEXT_MAX,
)

SENTENCE, MAY_BE_NOT_FINITE = "sentence", "may be not finite"
"""What a field's type may say beside its bound; see `Sentence` and `Result`."""

T = TypeVar("T")

Number = Annotated[int, Meta(ge=-1, le=NUMBER_MAX)]
"""-1 stands for none."""
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Sentence = Annotated[str, Meta(max_length=TEXT_MAX, extra={SENTENCE: True})]
"""For people: cut and made printable by the sender's codec, since it may hold the words of an exception."""
PublicName = Annotated[str, Meta(max_length=PUBLIC_NAME_MAX)]
Path = Annotated[str, Meta(max_length=PATH_MAX)]
Bytes = Annotated[bytes, Meta(max_length=BYTES_MAX)]
Result = Annotated[float, Meta(extra={MAY_BE_NOT_FINITE: True})]
"""Holds infinity or NaN after an honest step that diverged; the ledgers look at it and skip the step. Every other
number is finite."""
Counters = Annotated[dict[str, float], Meta(max_length=len(REPORT_COUNTERS))]
"""By the names of `REPORT_COUNTERS`."""

Items = Annotated[tuple[T, ...], Meta(max_length=ITEMS_MAX)]
Tasks = Annotated[tuple[TaskId, ...], Meta(max_length=TASKS_MAX)]
Tickets = Annotated[tuple[Ticket, ...], Meta(max_length=TASKS_MAX)]
Losses = Annotated[tuple[Result, ...], Meta(max_length=TASKS_MAX)]
Contributions = Annotated[tuple[ContributionId, ...], Meta(max_length=CONTRIBUTIONS_MAX)]
Tensors = Annotated[tuple[TensorRef, ...], Meta(max_length=TENSORS_MAX)]
Addresses = Annotated[tuple[Text, ...], Meta(max_length=ADDRESSES_MAX)]
Nodes = Annotated[tuple[NodeId, ...], Meta(max_length=ITEMS_MAX)]

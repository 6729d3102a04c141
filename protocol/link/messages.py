"""Messages that measure a link, questions of some number of bytes and their answers; who should measure, and what was
found."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.base.bounded import Addresses, Number, Tensors
from protocol.base.ids import NodeId
from protocol.base.limits import FELLOWS_MAX, LINKS_MAX
from protocol.base.message import Message


class MeasureAsk(Message, frozen=True, kw_only=True):
    """Asks for `byte_count` bytes in a `MeasureData` with the same number; 0 asks for a `MeasureGot` only."""

    number: Number
    byte_count: Number


class MeasureData(Message, frozen=True, kw_only=True):
    """Bytes without meaning. `answers` says whether they were asked for; if not, a `MeasureGot` goes back."""

    number: Number
    answers: bool
    tensors: Tensors


class MeasureGot(Message, frozen=True, kw_only=True):
    """Answers a `MeasureAsk` of 0 bytes or a `MeasureData`; `refused`: no more is measured for now."""

    number: Number
    refused: bool


class LinkFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node knows about its link to `peer`. Unknown: -1 for `round_trip_s` and `loss`, 0 for a rate."""

    peer: NodeId
    path: Literal["tcp", "quic", "channel", "relay"]
    """The way that carries the link at present."""
    round_trip_s: float
    loss: float
    """Share of packets that had to be sent again, or were lost."""
    sent_bytes_per_s: float
    """Goodput from the reporter to the peer, measured while the line was full."""
    received_bytes_per_s: float
    """The same from the peer."""
    age_s: float
    """Since the newest measurement of a rate."""
    spread: float
    """Median absolute deviation over median of what was measured."""


class LinkReport(Message, frozen=True, kw_only=True):
    """Now and then: all links of a node with its servers, as measured; replaces what it said before."""

    links: Annotated[tuple[LinkFigures, ...], Meta(max_length=LINKS_MAX)]


class Fellow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another server of the run."""

    node: NodeId
    addresses: Addresses
    """host:port, best first; empty where nobody can dial it."""


class Survey(Message, frozen=True, kw_only=True):
    """The coordinator asks a server, before the first plan, to link to its fellows and to measure links and itself.

    What they find comes back as `LinkReport` and `Join`. A plan ends the survey.
    """

    fellows: Annotated[tuple[Fellow, ...], Meta(max_length=FELLOWS_MAX)]

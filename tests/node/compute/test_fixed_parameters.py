"""Parameters in `p12` on a volunteer: whole once, then what changed; a base that is not there is named."""

from __future__ import annotations

import pytest
import torch

from node.compute.fixed_parameters import FixedParameters
from node.compute.forms import p12
from protocol.base.errors import RemoteProtocolError

BITS = 12
RANGES = [(0, 600), (600, 1000)]
_GENERATOR = torch.Generator().manual_seed(1)
VERSIONS = [torch.randn(1000, generator=_GENERATOR) * 0.02]
for _ in range(4):
    VERSIONS.append(VERSIONS[-1] + torch.randn(1000, generator=_GENERATOR) * 1e-3)


def sent(version: int, base: int | None = None, shard: int = 0) -> bytearray:
    """What the server of a shard makes."""
    begin, end = RANGES[shard]
    before = None if base is None else VERSIONS[base][begin:end]
    return p12.encode(VERSIONS[version][begin:end], before, -1 if base is None else base, BITS)


def test_every_way_to_a_version_gives_the_same_weights() -> None:
    """Whole, one change, three changes, and one shard whole beside another's changes."""
    held = FixedParameters(BITS, RANGES)
    held.load(0, [[sent(0)], [sent(0, shard=1)]], 0)
    held.load(1, [[sent(1, 0)], [sent(1, shard=1)]], 0)
    by_one = held.load(2, [[sent(2, 1)], [sent(2, 1, 1)]], 0)
    by_two = held.load(2, [[sent(1, 0), sent(2, 1)], [sent(2, shard=1)]], 0)
    assert torch.equal(by_one, by_two) and torch.equal(by_one, p12.received(VERSIONS[2], BITS))


def test_a_base_is_held_until_it_is_let_go() -> None:
    """Then a change of it is refused by name, and so are changes that do not follow each other or end elsewhere."""
    held = FixedParameters(BITS, RANGES)
    for version in (0, 1):
        held.load(version, [[sent(version)], [sent(version, shard=1)]], 0)
    whole = [sent(2, shard=1)]
    for wrong in ([sent(1, 0)], [sent(1, 0), sent(3, 2)], [sent(2), sent(2)], [], [b"short"], [sent(3, 2)]):
        with pytest.raises(RemoteProtocolError):
            held.load(2, [wrong, whole], 0)
    with pytest.raises(RemoteProtocolError):
        held.load(2, [whole], 0)
    held.load(2, [[sent(2, 1)], whole], keep_from=2)
    with pytest.raises(RemoteProtocolError, match="a change of version 1, which is not here"):
        held.load(3, [[sent(2, 1), sent(3, 2)], [sent(3, shard=1)]], 2)


def test_an_older_version_that_comes_after_a_newer_one_is_still_given() -> None:
    """Answers overtake each other: nobody is asked for changes since the older one, but a lease waits for its weights.
    (The device refused it with a bare number, and its lease had to run out.)"""
    held = FixedParameters(BITS, RANGES)
    held.load(1, [[sent(1)], [sent(1, shard=1)]], keep_from=1)
    older = held.load(0, [[sent(0)], [sent(0, shard=1)]], keep_from=1)
    assert torch.equal(older, p12.received(VERSIONS[0], BITS))
    held.load(2, [[sent(2, 1)], [sent(2, 1, 1)]], keep_from=2)

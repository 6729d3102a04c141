"""Tests of `d4`: what a stage has added, rotated and in four bits."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.compute.forms import d4
from node.compute.forms.heads import square_norm_most
from node.compute.wire import arrived, decode, encode, going_up, round_trip
from protocol.base.forms import BLOCK, byte_bounds
from tests.node.compute.forms.test_boundary_forms import SHAPES, blocks_of, values


@given(st.integers(0, 10**6), st.integers(0, 17))
@settings(max_examples=60, deadline=None)
def test_a_rotation_is_exact_in_whatever_order_it_is_summed(seed: int, bits: int) -> None:
    """As one product, by pairs, from the last value to the first, in fp64 and in whole numbers: the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(2**bits), 2**bits + 1, (9, BLOCK), generator=generator)
    matrix = d4.hadamard()
    expected = whole @ matrix.long()
    assert int(expected.abs().max()) < 2**24
    found = whole.float()
    backwards = torch.zeros(9, BLOCK)
    for place in reversed(range(BLOCK)):
        backwards += found[:, place, None] * matrix[place]
    pairs = found.clone()
    for length in (1, 2, 4, 8, 16, 32):
        halves = pairs.view(9, -1, 2, length)
        pairs = torch.stack((halves[:, :, 0] + halves[:, :, 1], halves[:, :, 0] - halves[:, :, 1]), 2).view(9, BLOCK)
    for other in (d4.rotate(found), d4.by_pairs(found), backwards, pairs, found.double() @ matrix.double()):
        assert torch.equal(other.long(), expected) and torch.equal(other, other.round())
    if bits < 12:
        assert torch.equal(d4.rotate(d4.rotate(found)), BLOCK * found)


def test_bytes_do_not_depend_on_how_a_device_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and values of an encoder that adds by pairs are those of one that multiplies."""
    x = values((3, 50, 200), 4, spread=12.0)
    data = d4.encode(x)
    back = d4.decode(data, (3, 50, 200))
    monkeypatch.setattr(d4, "rotate", d4.by_pairs)
    assert d4.encode(x) == data and torch.equal(d4.decode(data, (3, 50, 200)), back)


@given(SHAPES, st.integers(0, 10**6), st.floats(0, 20))
@settings(max_examples=60, deadline=None)
def test_no_code_is_further_than_half_a_step_from_its_value(shape: tuple[int, ...], seed: int, spread: float) -> None:
    """And a step is at most 3/20 of the largest rotated value, which is at most 8 times the block's norm. How large
    it may be is read off the bytes alone."""
    x = values(shape, seed, spread)
    data = d4.encode(x)
    least, most = byte_bounds(shape, "d4")
    assert least <= len(data) <= most
    back = d4.decode(data, shape)
    error, size = blocks_of(back - x).norm(dim=1), d4.rotate(blocks_of(x)).abs().amax(1)
    assert bool((error <= 0.075 * 1.001 * size).all())
    assert bool((size <= 8.001 * blocks_of(x).norm(dim=1)).all())
    assert float(back.double().square().sum()) <= square_norm_most(data, "d4", shape) * (1 + 1e-9)


def test_normal_values_lose_a_tenth() -> None:
    """10.5 % where a block is normal; a block of zeros is a block of zeros."""
    x = values((4, 64, 512), 3)
    error = float((round_trip(x, "d4") - x).norm() / x.norm())
    assert 0.103 < error < 0.108 and len(d4.encode(x)) == byte_bounds((4, 64, 512), "d4")[0]
    assert torch.equal(round_trip(torch.zeros(2, 3, 100), "d4"), torch.zeros(2, 3, 100))


def test_what_one_or_two_values_carry_alone_is_sent_apart_and_exact() -> None:
    """Also where nothing else is in the block; channels a thousand times the others cost bytes and no precision."""
    x = values((4, 8, 256), 5)
    plain = d4.decode(d4.encode(x), (4, 8, 256))
    spiked = x.clone()
    spiked[..., 70], spiked[..., 100] = 1000.0, -700.0
    data = d4.encode(spiked)
    back = d4.decode(data, (4, 8, 256))
    assert torch.equal(back[..., [70, 100]], spiked[..., [70, 100]])
    keep = [column for column in range(256) if column not in (70, 100)]
    assert float((back - spiked)[..., keep].norm()) <= 1.1 * float((plain - x)[..., keep].norm())
    assert len(data) == len(d4.encode(x)) + 4 * 8 * 2 * 8
    lonely = torch.zeros(1, 2, 130)
    lonely[0, 1, 129] = 0.3
    assert torch.equal(round_trip(lonely, "d4"), lonely)


def test_bytes_stay_what_they_are() -> None:
    """The form is written down: a change of one bit is a change of the protocol."""
    x = torch.arange(-96, 96).view(1, 192).float().pow(3) / 1000.0
    x[0, 130] = 1e6
    assert hashlib.blake2b(d4.encode(x), digest_size=8).hexdigest() == "31b1220af0b0a2f4"


def test_what_arrives_is_what_a_server_makes_of_what_went_up() -> None:
    """A tenth of what a stage has added is lost, not of all; where nothing came down, all of it goes up in `q8`."""
    x = round_trip(values((2, 8, 128), 1), "q8")
    y = x + 0.1 * values((2, 8, 128), 2)
    part, form = going_up(y, x, "d4")
    assert form == "d4"
    at_server = x + decode(encode(part, form), (2, 8, 128), form)
    assert torch.equal(arrived(y, x, "d4"), round_trip(at_server, "q8"))
    assert float((arrived(y, x, "d4") - y).norm()) < 0.02 * float(y.norm())
    assert torch.equal(arrived(y, None, "d4"), round_trip(y, "q8")) and going_up(y, None, "d4") == (y, "q8")
    assert torch.equal(arrived(y, x, "q8"), round_trip(y, "q8"))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_before_or_after_the_sum_comes_out_as_nan(bad: float) -> None:
    """A run that diverges goes on to its skipped step."""
    x = round_trip(values((1, 2, 64), 1), "q8")
    y = x.clone()
    y[0, 1, 3] = bad
    assert bool(arrived(y, x, "d4").isnan().all()) and bool(arrived(x, y, "d4").isnan().all())

"""Tests of `q8`, and of what `d4` has in common with it: what crosses a boundary in few bits."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node.compute.forms import q8
from node.compute.wire import decode, encode, round_trip
from protocol.base.errors import RemoteProtocolError
from protocol.base.forms import BLOCK, BLOCK_FORMS, HEAD_BYTES, byte_bounds, small_is_whole

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2, 63, 64, 65, 100, 128, 200]))


def values(shape: tuple[int, ...], seed: int, spread: float = 0.0) -> Tensor:
    """Normal values; with `spread`, rows whose sizes differ by so many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.rand(*shape[:-1], 1, generator=generator) * spread)
    return torch.randn(shape, generator=generator) * sizes


def blocks_of(tensor: Tensor) -> Tensor:
    """[n, 64]: rows cut into blocks, the last of each filled up with zeros."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).reshape(-1, BLOCK)


@given(SHAPES, st.integers(0, 10**6), st.floats(0, 20))
@settings(max_examples=60, deadline=None)
def test_eight_bits_lose_less_than_a_two_hundredth_of_a_blocks_largest(
    shape: tuple[int, ...], seed: int, spread: float
) -> None:
    """Half a step: 1/127 of the largest, up to 1/8 more for the scale's three bits."""
    x = values(shape, seed, spread)
    data = q8.encode(x)
    least, most = byte_bounds(shape, "q8")
    assert least <= len(data) <= most
    error, size = blocks_of(q8.decode(data, shape) - x), blocks_of(x)
    bound = size.abs().amax(1) * (0.5 * 1.126 / 127)
    assert bool((error.abs().amax(1) <= bound).all())


@pytest.mark.parametrize("form", BLOCK_FORMS)
@given(shape=SHAPES, seed=st.integers(0, 10**6), exponent=st.integers(-140, 120))
@settings(max_examples=40, deadline=None)
def test_any_size_of_numbers_passes(shape: tuple[int, ...], seed: int, exponent: int, form: str) -> None:
    """Numbers too small for a scale become zeros, too large ones the largest; nothing fails, nothing is infinite."""
    x = torch.ldexp(values(shape, seed).clamp(-100, 100), torch.tensor(exponent))
    back = round_trip(x, form)
    assert back.shape == shape and bool(torch.isfinite(back).all())
    if -40 < exponent < 100:
        assert float((back - x).norm()) <= 0.3 * float(x.norm())


def test_two_outliers_in_a_block_do_not_spoil_it() -> None:
    """Channels a thousand times the others, as trained models have them, cost bytes and no precision."""
    x = values((4, 8, 256), 5)
    plain = q8.decode(q8.encode(x), (4, 8, 256))
    spiked = x.clone()
    spiked[..., 70], spiked[..., 100] = 1000.0, -700.0
    data = q8.encode(spiked)
    back = q8.decode(data, (4, 8, 256))
    assert torch.equal(back[..., [70, 100]], spiked[..., [70, 100]])
    keep = [column for column in range(256) if column not in (70, 100)]
    error = float((back - spiked)[..., keep].norm())
    assert error <= 1.1 * float((plain - x)[..., keep].norm())
    assert len(data) == len(q8.encode(x)) + 4 * 8 * 2 * 8


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_values_that_are_not_finite_come_out_as_nan(form: str) -> None:
    """A run that diverges goes on to its skipped step: nobody computes with made-up numbers, and nothing fails."""
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = values((2, 3, 64), 1)
        x[1, 2, 5] = bad
        data = encode(x, form)
        assert small_is_whole(data, form, (2, 3, 64)) and len(data) == byte_bounds((2, 3, 64), form)[0]
        back = decode(data, (2, 3, 64), form)
        assert back.shape == x.shape and bool(back.isnan().all())
        assert bool(round_trip(x, form).isnan().all())
    assert small_is_whole(encode(values((2, 3, 64), 1), form), form, (2, 3, 64))
    assert small_is_whole(b"", form, (0, 64))


@pytest.mark.parametrize("form", BLOCK_FORMS)
@given(shape=SHAPES, seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_any_bytes_decode_to_finite_values_or_nan_or_are_refused(shape: tuple[int, ...], seed: int, form: str) -> None:
    """Random bytes of every allowed length, and true ones with some bytes changed: a look tells which it will be."""
    rng = random.Random(seed)
    least, most = byte_bounds(shape, form)
    noise = bytearray(rng.randbytes(rng.randint(least, most)))
    if rng.random() < 0.7:  # a head that lets it go further
        noise[:HEAD_BYTES] = bytes((rng.randint(64, 240), 0, 0, 0)) + ((len(noise) - least) // 8).to_bytes(4, "little")
    true = bytearray(encode(values(shape, seed), form))
    for _ in range(3):
        true[rng.randrange(len(true))] = rng.randrange(256)
    for data in (noise, true):
        whole = small_is_whole(data, form, shape)
        try:
            back = decode(data, shape, form)
        except RemoteProtocolError:
            assert not whole
            continue
        assert whole and back.shape == shape
        assert bool((back.isnan() if data[1] else torch.isfinite(back)).all())


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_bytes_are_the_same_however_the_tensor_lies_in_memory(form: str) -> None:
    """A view, a transposed copy and bf16 of the same values: the form depends on values alone."""
    x = values((3, 4, 128), 9).bfloat16().float()
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert encode(x, form) == encode(turned, form) == encode(x.bfloat16(), form)


def test_bytes_stay_what_they_are() -> None:
    """The form is written down: a change of one bit is a change of the protocol."""
    x = torch.arange(-96, 96).view(1, 192).float().pow(3) / 1000.0
    x[0, 130] = 1e6
    assert hashlib.blake2b(q8.encode(x), digest_size=8).hexdigest() == "e60a7b470b312de0"


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_chunks_do_not_show(form: str) -> None:
    """A tensor longer than one chunk of work gives the bytes of its parts, as long as they share a top scale."""
    x = values((1, 3000, 64), 2)
    x[0, :, 0] = 4.0  # the same largest scale in every part
    whole = round_trip(x, form)
    parts = [round_trip(part, form) for part in torch.split(x, 700, dim=1)]
    assert torch.equal(whole, torch.cat(parts, dim=1))

"""Tests of `node.compute.wire`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.compute.wire import check_shape, check_tokens, decode, encode
from protocol.base.errors import RemoteProtocolError


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from(["fp32", "bf16", "int32"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_was_encoded_is_decoded(sizes: list[int], form: str, writable: bool) -> None:
    """Any shape in any form comes back, from read-only and from writable buffers; bf16 after rounding."""
    shape = tuple(sizes)
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    if form != "int32":
        tensor = tensor * math.pi - 9
    data = encode(tensor, form)
    assert check_shape(shape, form) == (data.nbytes, data.nbytes)
    back = decode(bytearray(data) if writable else bytes(data), shape, form)
    assert back.shape == shape
    expected = tensor.bfloat16().float() if form == "bf16" else tensor
    assert torch.equal(back, expected)


def test_bytes_are_little_endian_rows() -> None:
    """The form on the wire is written down: two fp32 values and one row of int32."""
    assert bytes(encode(torch.tensor([1.0, -2.0]), "fp32")).hex() == "0000803f000000c0"
    assert bytes(encode(torch.tensor([1.0, -2.0]), "bf16")).hex() == "803f00c0"
    assert bytes(encode(torch.tensor([[1, 258]]), "int32")).hex() == "0100000002010000"
    assert bytes(encode(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, "fp32")) == bytes(
        encode(torch.tensor([1.0, 3.0, 2.0, 4.0]), "fp32")
    )


def test_fp32_travels_without_copies() -> None:
    """Encoding shows the tensor's own memory, decoding the buffer's."""
    tensor = torch.zeros(4)
    data = encode(tensor, "fp32")
    tensor[0] = 1.0
    assert bytes(data[:4]).hex() == "0000803f"
    buffer = bytearray(16)
    decoded = decode(buffer, (4,), "fp32")
    decoded[3] = 1.0
    assert buffer[12:].hex() == "0000803f"


def test_tensors_at_odd_addresses_decode() -> None:
    """A view into the middle of a frame need not be aligned."""
    frame = bytearray(b"\xff" + bytes(encode(torch.tensor([1.5, -2.5]), "fp32")))
    assert decode(memoryview(frame)[1:], (2,), "fp32").tolist() == [1.5, -2.5]


@pytest.mark.parametrize(
    ("size", "shape", "form"),
    [
        (7, (2,), "fp32"),
        (9, (2,), "fp32"),
        (8, (3,), "fp32"),
        (8, (2,), "bf16"),
        (8, (2,), "pickle"),
        (8, (-1, -2), "fp32"),
        (8, (1, 1, 1, 1, 2), "fp32"),
        (8, (2**40, 2**40), "fp32"),
    ],
)
def test_wrong_tensors_are_refused(size: int, shape: tuple[int, ...], form: str) -> None:
    """A buffer that is not exactly what shape and form say is refused with a named reason."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode(bytes(size), shape, form)
    assert caught.value.reason == "shape"


def test_tokens_outside_of_the_vocabulary_are_refused() -> None:
    """Only 0 to vocabulary - 1 pass."""
    check_tokens(torch.tensor([0, 36]), 37, "tokens")
    check_tokens(torch.tensor([], dtype=torch.int64), 37, "tokens")
    for bad in (-1, 37):
        with pytest.raises(RemoteProtocolError, match="vocabulary"):
            check_tokens(torch.tensor([0, bad]), 37, "tokens")

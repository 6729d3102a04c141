"""A seeded shuffle of any size with random access: the place of one element costs the same as for ten or a billion."""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_WORD = (1 << 64) - 1


class Permutation:
    """A bijection of range(`size`), decided by `seed` and `purpose`, the same on every machine and Python.

    A balanced Feistel network over the next even power of two (Luby and Rackoff, 1988), walked until it falls into the
    range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002): less than four steps on average. It
    shuffles; it hides nothing.
    """

    def __init__(self, size: int, seed: int, purpose: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        material = hashlib.blake2b(
            f"{seed}/{purpose}".encode(), digest_size=8 * _ROUNDS, person=b"br-permutation"
        ).digest()
        self._keys = [int.from_bytes(material[8 * turn : 8 * turn + 8], "little") for turn in range(_ROUNDS)]

    def __getitem__(self, place: int) -> int:
        """The element at `place`."""
        if not 0 <= place < self.size:
            raise IndexError(place)
        value = self._shuffle(place)
        while value >= self.size:  # ends: the walk follows a cycle that holds `place`
            value = self._shuffle(value)
        return value

    def _shuffle(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            # The finalizer of MurmurHash3, whose output bits each depend on all input bits.
            mixed = (right ^ key) & _WORD
            mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & _WORD
            mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & _WORD
            left, right = right, left ^ ((mixed ^ mixed >> 33) & self._mask)
        return left << self._half_bits | right

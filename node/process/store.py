"""The tensors of a process: keys to buffers, with sharing, a byte budget, and a count that shows leaks.

Machines hold `TensorRef`s and never bytes; this store is where the keys lead. The keys of one process come from one
counter, whether a machine takes them (for the results of its jobs, for copies) or the driver does (for what came from
the wire or from the journal). Every key must be dropped exactly once. A buffer lives while a key leads to it.

The store is used by one thread, the driver's. Lanes and the journal get buffers, not the store, and a buffer never
changes after it was put here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from protocol.base.errors import LocalProtocolError
from protocol.base.forms import FORMS, byte_bounds
from protocol.base.ids import TensorRef

Buffer = bytes | bytearray | memoryview

DEFAULT_BUDGET_BYTES = 8 * 2**30
"""What a process may hold in all: far above what a healthy run needs (two steps), far below a leak's appetite."""


class StoreError(LocalProtocolError):
    """A key was used before it was put, after it was dropped, or twice: a bug of ours."""


class StoreFullError(Exception):
    """The byte budget is spent: the process stops with this reason rather than being killed by the system."""


@dataclass(slots=True)
class _Entry:
    """One buffer and how many keys lead to it. `load` is set while the bytes still lie on disk."""

    buffer: Buffer | None
    load: Callable[[], Buffer] | None
    byte_count: int
    keys: int = 1


class TensorStore:
    """Key -> buffer. Raises `StoreError` for our own mistakes and `StoreFullError` at the budget.

    Args:
        keys: numbers for what comes from outside; the machine's outbox takes from the same counter.
    """

    def __init__(self, keys: Iterator[int] | None = None, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self._entries: dict[int, _Entry] = {}
        self._budget_bytes = budget_bytes
        self._keys = count(1) if keys is None else keys
        self.byte_count = 0
        """Bytes in memory, each shared buffer once."""
        self.peak_bytes = 0

    def __len__(self) -> int:
        """Keys that are alive: after a run, anything but 0 is a leak."""
        return len(self._entries)

    def keys(self) -> tuple[int, ...]:
        """The keys that are alive, oldest first: what a leak report prints."""
        return tuple(self._entries)

    def add(self, buffer: Buffer, shape: tuple[int, ...], form: str) -> TensorRef:
        """Takes a buffer that came from outside under a fresh key."""
        return self.put(next(self._keys), buffer, shape, form)

    def add_lazy(self, load: Callable[[], Buffer], shape: tuple[int, ...], form: str, byte_count: int) -> TensorRef:
        """Takes a tensor that lies on disk; `load` is called at the first `get`, and must not fail silently."""
        ref = self._ref(next(self._keys), shape, form, byte_count)
        self._entries[ref.key] = _Entry(None, load, ref.byte_count)
        return ref

    def put(self, key: int, buffer: Buffer, shape: tuple[int, ...], form: str) -> TensorRef:
        """Stores a buffer under a key that its owner chose; the key must be free, the length one of the form."""
        length = memoryview(buffer).nbytes
        ref = self._ref(key, shape, form, length)
        if key in self._entries:
            raise StoreError(f"tensor {key} is already in the store")
        self._reserve(length)
        self._entries[key] = _Entry(buffer, None, length)
        return ref

    def get(self, key: int) -> Buffer:
        """The bytes of a key, loaded from disk if they still lie there."""
        entry = self._entry(key)
        if entry.buffer is None:
            assert entry.load is not None, "an entry has a buffer or a way to it"
            self._reserve(entry.byte_count)
            entry.buffer = entry.load()
            entry.load = None
            if memoryview(entry.buffer).nbytes != entry.byte_count:
                raise StoreError(f"tensor {key}: the disk gave {memoryview(entry.buffer).nbytes} bytes")
        return entry.buffer

    def share(self, key: int, copy: int) -> None:
        """Lets `copy` lead to the buffer of `key`; both must be dropped."""
        if copy in self._entries:
            raise StoreError(f"tensor {copy} is already in the store")
        entry = self._entry(key)
        entry.keys += 1
        self._entries[copy] = entry

    def drop(self, keys: Iterable[int]) -> None:
        """Forgets keys; a buffer goes with its last key."""
        for key in keys:
            entry = self._entry(key)
            del self._entries[key]
            entry.keys -= 1
            if entry.keys == 0 and entry.buffer is not None:
                self.byte_count -= entry.byte_count

    def _entry(self, key: int) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise StoreError(f"tensor {key} is not in the store")
        return entry

    def _reserve(self, byte_count: int) -> None:
        if self.byte_count + byte_count > self._budget_bytes:
            raise StoreFullError(
                f"tensor store full: {self.byte_count} of {self._budget_bytes} bytes held under {len(self)} keys"
            )
        self.byte_count += byte_count
        self.peak_bytes = max(self.peak_bytes, self.byte_count)

    @staticmethod
    def _ref(key: int, shape: tuple[int, ...], form: str, byte_count: int) -> TensorRef:
        if form not in FORMS:
            raise StoreError(f"tensor {key}: unknown form {form!r}")
        least, most = byte_bounds(shape, form)
        if not least <= byte_count <= most:
            raise StoreError(f"tensor {key}: {byte_count} bytes do not make {form} of shape {shape}")
        return TensorRef(key, tuple(shape), form, byte_count)  # type: ignore[arg-type]

"""The tensor store: sharing, dropping, budget, and loudness at our own mistakes."""

from __future__ import annotations

import random
from itertools import count

import pytest

from node.process.store import StoreError, StoreFullError, TensorStore


def test_keys_come_from_the_counter_that_the_machine_takes_from() -> None:
    """What comes from outside gets a number that no machine has taken or will take."""
    keys = count(7)
    store = TensorStore(keys)
    refs = []
    for _ in range(2):
        refs.append(store.add(b"\0" * 8, (2,), "fp32"))
        store.put(next(keys), b"1234", (1,), "fp32")
    assert [ref.key for ref in refs] == [7, 9] and store.keys() == (7, 8, 9, 10)
    assert refs[0].byte_count == 8 and refs[0].shape == (2,) and refs[0].form == "fp32"


def test_a_shared_buffer_lives_until_its_last_key_is_dropped() -> None:
    """Sharing costs no bytes, and either key may be dropped first."""
    store = TensorStore()
    store.put(1, b"12345678", (4,), "bf16")
    store.share(1, 2)
    assert store.byte_count == 8 and len(store) == 2
    store.drop([1])
    assert store.get(2) == b"12345678" and store.byte_count == 8
    store.drop([2])
    assert len(store) == 0 and store.byte_count == 0


@pytest.mark.parametrize(
    "mistake",
    [
        lambda store: store.get(7),
        lambda store: store.drop([7]),
        lambda store: store.drop([1, 1]),
        lambda store: store.share(7, 9),
        lambda store: store.share(1, 1),
        lambda store: store.put(1, b"1234", (1,), "fp32"),
        lambda store: store.put(2, b"123", (1,), "fp32"),
        lambda store: store.put(2, b"1234", (1,), "fp8"),
    ],
    ids=["get", "drop", "drop twice", "share unknown", "share onto", "put twice", "length", "form"],
)
def test_our_own_mistakes_raise(mistake: object) -> None:
    """A key used before its put, after its drop or twice is an error, never a silent nothing."""
    store = TensorStore()
    store.put(1, b"1234", (1,), "fp32")
    with pytest.raises(StoreError):
        mistake(store)  # type: ignore[operator]


def test_the_budget_holds() -> None:
    """A put that would exceed the budget is refused with the figures, and changes nothing."""
    store = TensorStore(budget_bytes=10)
    store.put(1, b"12345678", (2,), "fp32")
    with pytest.raises(StoreFullError, match="8 of 10 bytes held under 1 keys"):
        store.put(2, b"1234", (1,), "fp32")
    assert len(store) == 1 and store.byte_count == 8


def test_a_lazy_tensor_is_loaded_once_and_counts_only_then() -> None:
    """What lies on disk costs no memory until it is asked for, and one that nobody asked for is never loaded."""
    loads: list[int] = []

    def load() -> bytes:
        loads.append(1)
        return b"1234"

    store = TensorStore()
    first, second = store.add_lazy(load, (1,), "fp32", 4), store.add_lazy(load, (1,), "fp32", 4)
    assert store.byte_count == 0
    assert store.get(first.key) == b"1234" and store.get(first.key) == b"1234"
    assert len(loads) == 1 and store.byte_count == 4
    store.drop([first.key, second.key])
    assert len(loads) == 1 and store.byte_count == 0 and len(store) == 0


def test_bytes_are_those_of_the_reachable_buffers_after_any_history() -> None:
    """Over random puts, shares and drops the count of bytes equals the sum over distinct live buffers."""
    rng = random.Random(5)
    store, next_key = TensorStore(), 1
    model: dict[int, tuple[int, int]] = {}  # key: the buffer that it names, and its bytes
    for _ in range(2000):
        choice = rng.random()
        if choice < 0.4 or not model:
            size = rng.randrange(1, 9)
            store.put(next_key, bytes(4 * size), (size,), "fp32")
            model[next_key] = (next_key, 4 * size)
            next_key += 1
        elif choice < 0.6:
            key = rng.choice(list(model))
            store.share(key, next_key)
            model[next_key] = model[key]
            next_key += 1
        else:
            key = rng.choice(list(model))
            store.drop([key])
            del model[key]
        assert store.byte_count == sum(dict(model.values()).values())
        assert store.keys() == tuple(model)

"""A little of what `python -m tests.fuzz` does at length: every decoder refuses damage as it promises."""

from __future__ import annotations

import time

import pytest

from tests.fuzz import fuzzer
from tests.fuzz.fuzzer import Find, damaged, fuzz
from tests.fuzz.targets import TARGETS, Target, seeds_of


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_decoder_refuses_damage_as_it_promises(target: Target) -> None:
    """A few hundred inputs of the beginning, and everything that was ever found."""
    for seed in seeds_of(target):
        try:
            target.run(seed)
        except target.may_raise:
            continue
    assert fuzz(target, 0, 300) == []


@pytest.mark.slow
def test_a_decoder_that_lets_another_error_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer can fail: an index beyond the end, and a loop without one."""

    def careless(data: bytes) -> int:
        return data[4]

    def endless(data: bytes) -> None:
        while len(data) > 10:
            pass

    monkeypatch.setattr(fuzzer, "FIRST_USE_S", 1.0)
    finds = fuzz(Target("careless", careless, (ValueError,), lambda: [b"12345"]), 0, 200)
    assert finds and finds[0].what.startswith("IndexError")
    assert damaged(finds[0].number, [b"12345"], "careless") == finds[0].data, "a find can be made again"
    (hang,) = fuzz(Target("endless", endless, (), lambda: [b"1" * 11]), 3, 1) or [Find("", 0, b"", "none")]
    assert hang.what in ("no end after 1.0 s", "none")


def test_what_a_decoder_loads_at_its_first_use_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes a second on a busy computer, and a process in which its loading was cut off is spoilt."""
    monkeypatch.setattr(fuzzer, "HANG_S", 0.05)
    loaded: list[bool] = []

    def lazy(data: bytes) -> None:
        if not loaded:
            time.sleep(0.2)
            loaded.append(True)

    assert fuzz(Target("lazy", lazy, (), lambda: [b"1"]), 0, 10) == []

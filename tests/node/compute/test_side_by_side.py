"""Tests of `node.compute.side_by_side`."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import Future

import pytest
import torch

from node.compute.side_by_side import SideBySide


@pytest.mark.parametrize("threads", [1, 3])
def test_what_comes_of_pieces_keeps_their_order(threads: int) -> None:
    assert list(SideBySide(threads).each(lambda number: number**2, range(20))) == [number**2 for number in range(20)]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_piece_that_fails_is_the_callers_error(threads: int) -> None:
    def refuse(number: int) -> None:
        if number == 4:
            raise MemoryError("no room for the fourth")

    with pytest.raises(MemoryError, match="fourth"):
        SideBySide(threads).all(refuse, range(6))


def test_nobody_works_on_a_job_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece that goes on would write into what its caller has given up; those that have not begun never do."""
    is_begun, is_waited_for, begun, ended = threading.Event(), threading.Event(), list[int](), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            is_begun.wait(30)
            raise MemoryError
        is_begun.set()
        is_waited_for.wait(30)
        ended.append(number)

    def wait(running: list[Future[None]]) -> None:
        is_waited_for.set()
        concurrent.futures.wait(running)

    monkeypatch.setattr("node.compute.side_by_side.wait", wait)
    with pytest.raises(MemoryError):
        SideBySide(2).all(work, range(50))
    assert is_waited_for.is_set() and sorted(begun) == [0, *sorted(ended)] and 0 < len(ended) < 10


def test_pieces_are_worked_on_at_once_by_threads_of_one_core_each() -> None:
    """Each waits for the others, and torch shares nothing out in them."""
    meet = threading.Barrier(3, timeout=30)

    def work(_: int) -> int:
        meet.wait()
        return torch.get_num_threads()

    assert list(SideBySide(3).each(work, range(3))) == [1, 1, 1]

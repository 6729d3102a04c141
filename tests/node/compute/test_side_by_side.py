"""Tests of `node.compute.side_by_side`."""

from __future__ import annotations

import threading
import time

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


def test_nobody_works_on_a_job_that_has_failed() -> None:
    """A piece that goes on would write into what its caller has given up; those that have not begun never do."""
    first_is_over, begun, ended = threading.Event(), list[int](), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            first_is_over.set()
            raise MemoryError
        first_is_over.wait(30)
        time.sleep(0.05)  # what is tested is that the caller waits for this
        ended.append(number)

    with pytest.raises(MemoryError):
        SideBySide(2).all(work, range(50))
    assert sorted(begun) == [0, *sorted(ended)] and len(begun) < 10


def test_pieces_are_worked_on_at_once_by_threads_of_one_core_each() -> None:
    """Each waits for the others, and torch shares nothing out in them."""
    meet = threading.Barrier(3, timeout=30)

    def work(_: int) -> int:
        meet.wait()
        return torch.get_num_threads()

    assert list(SideBySide(3).each(work, range(3))) == [1, 1, 1]

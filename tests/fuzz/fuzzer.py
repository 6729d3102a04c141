"""Input number N of a target is always the same: a seed of the corpus with damage drawn from the number.

So a run goes on where the last one stopped, a find is named by two words, and nothing has to be kept but a count.
"""

from __future__ import annotations

import random
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from tests.fuzz.targets import Target, seeds_of

HANG_S = 1.0
"""One input may take so long; a busy machine is allowed for by asking twice."""
FIRST_USE_S = 30.0
"""A decoder may load torch when it is used for the first time; a process in which that was cut off is spoilt."""
MEMORY_BYTES = 64 << 20
"""What a whole stretch of inputs may add to the process."""
FINDS_MAX = 3
"""Of one stretch: most have one cause."""
_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x90, 0xA0, 0xC0, 0xC4, 0xC6, 0xCC, 0xCF, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF)
"""Bytes that begin numbers, strings, arrays and maps of msgpack, and the edges of a byte."""
_WORDS = (
    b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xdd\xff\xff\xff\xff", b"\xc6\x7f\xff\xff\xff", b"../", b"\x1b]52;",
    b"-1", b"1e999", b"\xf0\x9f\xa7\x80", b"&#x110000;", b"<" * 8, b"[" * 64, b"\x91" * 64,
)  # fmt: skip


@dataclass(frozen=True)
class Find:
    """An input that a decoder did not refuse as it promises."""

    target: str
    number: int
    data: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.target} {self.number}: {self.what}\n{self.data.hex()}"


class _HangError(BaseException):
    """Raised into a decoder that does not come back."""


def damaged(number: int, seeds: list[bytes], target: str) -> bytes:
    """Input `number` of a target."""
    draw = random.Random(f"{target} {number}")
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << draw.randrange(8)
            case 1 if data:
                data[at % len(data)] = draw.choice(_INTERESTING)
            case 2:
                del data[at : at + draw.choice((1, 1, 2, 4, 16, 256))]
            case 3:
                data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 16)))
            case 4:
                data[at:at] = draw.choice(_WORDS)
            case 5:
                del data[at:]
            case 6:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[at:] = other[start : start + 4096]
            case _:
                data[at:at] = data[draw.randrange(len(data) + 1) :][: draw.choice((1, 8, 64, 1024))]
    return bytes(data[:65536])


def fuzz(target: Target, first: int, count: int) -> list[Find]:
    """Runs inputs `first` to `first + count - 1`; what was found, at most FINDS_MAX."""
    seeds, finds = seeds_of(target), []
    with _watch():
        _judge(target, seeds[0], FIRST_USE_S)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(first, first + count):
            data = damaged(number, seeds, target.name)
            what = _judge(target, data)
            if what and what == _judge(target, data):  # a hang of the machine does not come again
                finds.append(Find(target.name, number, data, what))
                if len(finds) >= FINDS_MAX:
                    break
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY_BYTES:
        finds.append(Find(target.name, first, b"", f"{grown >> 20} MiB more memory after {count} inputs"))
    return finds


def _judge(target: Target, data: bytes, seconds: float | None = None) -> str:
    """What is wrong with how the decoder took `data`, or nothing."""
    seconds = HANG_S if seconds is None else seconds
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        target.run(data)
    except target.may_raise:
        return ""
    except _HangError:
        return f"no end after {seconds} s"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


@contextmanager
def _watch() -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise _HangError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)

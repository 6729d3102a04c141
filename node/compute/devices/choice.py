"""What `--device` says, as a value. Needs no torch, so that a wrong word is refused at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from protocol.base.errors import BadInputError

Kind = Literal["auto", "cpu", "cuda", "xpu", "mps", "small"]
SMALL_BYTES = 256 << 20
"""What `small` has without a number: a stage of some million parameters and a few graphs."""
HELP = (
    "What computes: auto (the first accelerator that works, else the processor), cpu, cuda, cuda:1, xpu or mps. For"
    " trying things, small:MB is a processor that runs out of memory at so many megabytes."
)
SEVERAL_HELP = (
    f"{HELP} Several with commas, as in cuda:0,1: each is a member of the run of its own, and all have one owner."
)
DEVICES_MAX = 8
"""Servers and coordinator open as many links to one network (`protocol.base.limits.LINKS_PREFIX_MAX`): a ninth would
dial for ever."""


@dataclass(frozen=True)
class DeviceChoice:
    """A kind of device and, where there are several, which; or how much memory a small one pretends to have."""

    kind: Kind = "auto"
    index: int = 0
    memory_bytes: int = SMALL_BYTES

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """Raises `BadInputError` with a sentence that names the option."""
        word, colon, number = text.strip().lower().partition(":")
        if word not in get_args(Kind):
            raise BadInputError(f"--device {text}: not one of {', '.join(get_args(Kind))}")
        kind = cast(Kind, word)
        if not colon:
            return cls(kind)
        if not number.isdigit() or kind in ("auto", "cpu", "mps") or len(number) > 7:
            raise BadInputError(f"--device {text}: {word} takes {_after_colon(kind)} after it")
        return cls(kind, memory_bytes=int(number) << 20) if kind == "small" else cls(kind, int(number))

    @classmethod
    def parse_all(cls, text: str) -> tuple[DeviceChoice, ...]:
        """One, or several with commas; a number alone is one more of the kind before it. Raises `BadInputError`."""
        pieces = [piece.strip() for piece in text.split(",")]
        if len(pieces) == 1:
            return (cls.parse(text),)
        found: list[DeviceChoice] = []
        for piece in pieces:
            found.append(cls.parse(f"{found[-1].kind}:{piece}" if found and piece.isdigit() else piece))
        for choice in found:
            if choice.kind in ("auto", "cpu", "mps"):
                raise BadInputError(f"--device {text}: {choice.kind} can only stand alone")
            if choice.kind != "small" and found.count(choice) > 1:
                raise BadInputError(f"--device {text}: {choice} is there twice")
        if len(found) > DEVICES_MAX:
            raise BadInputError(f"--device {text}: at most {DEVICES_MAX} devices")
        return tuple(found)

    @property
    def may_be_missing(self) -> bool:
        """Whether this computer may lack it: the processor is always there, also as a small device or for `auto`."""
        return self.kind not in ("auto", "cpu", "small")

    def __str__(self) -> str:
        if self.kind == "small":
            return f"small:{self.memory_bytes >> 20}"
        return f"{self.kind}:{self.index}" if self.kind in ("cuda", "xpu") else self.kind


def _after_colon(kind: Kind) -> str:
    if kind == "small":
        return "a number of megabytes"
    return "the device's number" if kind in ("cuda", "xpu") else "nothing"

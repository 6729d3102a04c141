"""`builtin:grammar`: endless small sentences whose end depends on their beginning, with a known entropy.

The language is a finite table of sentences with probabilities, drawn independently one after the other. What must be
learned reaches far: number and pronoun agree with a name or a count at the beginning, and brackets close in the order
in which they were opened. A model that has learned every rule reaches `floor` and none can do better, so tests compare
a loss with a number that is known. The same bytes come out on every machine and in every version of Python.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math

_PEOPLE = (("Anna", "she", "her"), ("Bruno", "he", "his"), ("Carla", "she", "her"), ("David", "he", "his"))
_COUNTS = ("One", "Two", "Three", "Four")
_COLOURS = ("red", "blue", "green", "black")
_THINGS = ("box", "cup", "stone", "letter")
_PLACES = ("house", "garden", "harbour", "market")
_TIMES = ("today", "at noon", "after the rain", "before night")
_BRACKETS = ("()", "[]", "{}")
_DEPTHS = ((1, 1 / 2), (2, 1 / 4), (3, 1 / 8), (4, 1 / 8))
"""How many brackets stand inside each other, and how often."""


@functools.cache
def sentences() -> dict[str, float]:
    """Every sentence with its probability. None is the beginning of another, so a text has one reading."""
    table: dict[str, float] = {}
    kind = 1 / 3
    chance = kind / math.prod(map(len, (_PEOPLE, _COLOURS, _THINGS, _PLACES, _TIMES)))
    for person, colour, thing, place, time in itertools.product(_PEOPLE, _COLOURS, _THINGS, _PLACES, _TIMES):
        name, pronoun, possessive = person
        table[
            f"{name} left {possessive} {colour} {thing} in the {place} {time}, and then {pronoun} came back for it. "
        ] = chance
    chance = kind / math.prod(map(len, (_COUNTS, _COLOURS, _THINGS, _PLACES, _TIMES)))
    for count, colour, thing, place, time in itertools.product(_COUNTS, _COLOURS, _THINGS, _PLACES, _TIMES):
        things, were = (thing, "it was") if count == "One" else (_plural(thing), "they were")
        table[f"{count} {colour} {things} stood in the {place}, and {time} {were} gone. "] = chance
    for depth, share in _DEPTHS:
        for pairs in itertools.product(_BRACKETS, repeat=depth):
            opened = "".join(pair[0] for pair in pairs)
            closed = "".join(pair[1] for pair in reversed(pairs))
            table[f"We opened {opened} and shut {closed}. "] = kind * share / len(_BRACKETS) ** depth
    return table


def sample_text(seed: int, purpose: str, number: int, least_characters: int) -> str:
    """Sentences until there are `least_characters`; decided by the first three arguments alone.

    A longer text of the same sample begins with the shorter one.
    """
    texts, ladder = _ladder()
    shortest = min(map(len, texts))
    draws = hashlib.shake_128(f"{seed}/{purpose}/{number}".encode()).digest(8 * (least_characters // shortest + 1))
    parts: list[str] = []
    length = begin = 0
    while length < least_characters:
        draw = int.from_bytes(draws[begin : begin + 8], "little") / 2**64
        parts.append(texts[min(bisect.bisect_right(ladder, draw), len(texts) - 1)])
        length += len(parts[-1])
        begin += 8
    return "".join(parts)


@functools.cache
def floor(context: int) -> float:
    """The least mean loss in nats per byte over the first `context` bytes of a sample: their entropy over their number.

    A byte's entropy depends only on how far its sentence has come. So the mean at place t is the sum, over the places s
    at which a sentence may begin, of the chance that one does times the mean entropy of a sentence's byte t - s.
    """
    table = sentences()
    longest = max(map(len, table))
    lengths: dict[int, float] = {}
    for text, chance in table.items():
        lengths[len(text)] = lengths.get(len(text), 0.0) + chance
    # Entropy of a sentence's first d bytes; the growth from d to d + 1 is the mean entropy of byte d.
    known = [_entropy_of_beginnings(table, end) for end in range(longest + 1)]
    begins = [0.0] * context
    total = 0.0
    for place in range(context):
        begins[place] = float(place == 0) + sum(
            chance * begins[place - length] for length, chance in lengths.items() if length <= place
        )
        for depth in range(min(longest, place + 1)):
            total += begins[place - depth] * (known[depth + 1] - known[depth])
    return total / context


def _entropy_of_beginnings(table: dict[str, float], end: int) -> float:
    chances: dict[str, float] = {}
    for text, chance in table.items():
        chances[text[:end]] = chances.get(text[:end], 0.0) + chance
    return -sum(chance * math.log(chance) for chance in chances.values())


@functools.cache
def _ladder() -> tuple[list[str], list[float]]:
    table = sentences()
    return list(table), list(itertools.accumulate(table.values()))


def _plural(thing: str) -> str:
    return thing + ("es" if thing.endswith("x") else "s")

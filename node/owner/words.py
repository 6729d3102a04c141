"""A daemon's status in words: what it does, and if it does nothing, why. For 80 columns."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from node.owner.tally import Given, in_words, part_in_words, signed_in_words
from node.owner.units import show_rate
from protocol.base.printable import printable

STATES = {
    "starting": "STARTING",
    "working": "WORKING",
    "waiting": "WAITING",
    "paused": "PAUSED",
    "finishing": "FINISHING",
    "leaving": "LEAVING",
}
WAYS = {"tcp": "by TCP", "quic": "by UDP", "channel": "by a data channel", "relay": "through a relay"}
"""Paths of links, in a newcomer's words."""
LEAVING = "finishing what was begun, then it ends"
FINISHED = "the run is finished, so this ends"
WIDTH = 80


def headline(status: dict[str, Any]) -> str:
    """One line: the run, the state, and the one reason for it."""
    name = printable(status["run"]) or "Barnraise"
    text = f"{name}  {STATES[status['state']]}"
    if not status["begun"]:
        text += f"  {status['sentence']}" if status["state"] == "starting" else "  nothing was begun yet"
        return text + "".join(f"; then it pauses, {sentence}" for _, sentence in status["holds"])
    if status["state"] == "leaving":
        return f"{text}  {status['sentence']}"
    if status["state"] == "working":
        text += f"  on {parts_in_words(status)} of the model" if status["stage"] >= 0 else ""
    elif status["sentence"]:
        text += f"  {status['sentence'].removeprefix('waiting ')}"
    if status["state"] == "finishing":
        text += "; what was begun is finished first"
    if status["state"] == "paused" and status["device"]["free"]:
        text += ". Nothing runs here; the device's memory is free."
    return text


def describe(status: dict[str, Any]) -> str:
    """All lines that `barnraise status` prints for a lent computer."""
    lines = _wrap(headline(status))
    if not status["begun"]:
        return "\n".join(lines)
    device, line = status["device"], status["line"]
    others = [sentence for reason, sentence in status["holds"] if reason != status["reason"]]
    if others:
        lines += _wrap(f"also    {'; '.join(others)}")
    if status["complaint"]:
        lines += _wrap(f"limits  {status['complaint']}")
    if status["update"]:
        lines += _wrap(f"update  {status['update']}")
    parts = [device["name"]]
    if device["temperature_c"] is not None:
        limit = device["temperature_limit_c"]
        parts.append(f"{device['temperature_c']:.0f} C" + ("" if limit is None else f" of {limit:g}"))
    if device["power_w"] is not None:
        parts.append(f"{device['power_w']:.0f} W")
    if device["memory_bytes"]:
        whose = "for this program itself" if device["free"] else "in use for it"
        parts.append(f"{device['memory_bytes'] / 1e9:.1f} GB of memory {whose}")
    if device["share"] < 1:
        parts.append(f"{100 * device['share']:.0f} % of the time")
    lines += _wrap("device  " + ", ".join(parts))
    for card in status.get("cards", []):
        lines += _wrap(f"card    {printable(card['device'])}: {card_in_words(card, status['stages'])}")
    ways = ", ".join(f"{count} {WAYS.get(way, way)}" for way, count in line["paths"].items()) or "none"
    now = f"{8e-6 * line['bytes_per_s']:.1f} Mbit/s now, " if line["paths"] else ""  # the mean of before fades slowly
    moved = f"{now}{line['moved_bytes'] / 1e9:.2f} GB this visit, both ways together"
    limits = limits_in_words(line["up_limit_bytes_per_s"], line["down_limit_bytes_per_s"])
    lines += _wrap(f"line    {moved}; {limits}; links: {ways}")
    if line["quota_left_bytes"] is not None:
        lines.append(f"        {line['quota_left_bytes'] / 1e9:.1f} GB left of this month's quota")
    lines += _wrap(f"today   {in_words(Given(**status['today']))}")
    lines += _wrap(f"in all  {in_words(Given(**status['ever']))}")
    if status["signed"]["ever"] is not None:
        signed = signed_in_words(Given(**status["signed"]["ever"]), bool(status.get("cards")))
        lines += _wrap(f"signed  {signed}: `barnraise thanks`")
    if status["news"] is not None:
        lines += describe_news(status["news"])
    return "\n".join(lines)


def parts_in_words(status: dict[str, Any]) -> str:
    """The stages on which a computer works, counted from one."""
    stages = {status["stage"], *(card["stage"] for card in status.get("cards", []) if not card["ended"])}
    held = [str(stage + 1) for stage in sorted(stages) if stage >= 0]
    words = f"parts {', '.join(held[:-1])} and {held[-1]}" if len(held) > 1 else f"part {held[0]}"
    return f"{words} of {status['stages']}"


def card_in_words(card: dict[str, Any], stages: int) -> str:
    """What one of several devices does."""
    if card["ended"]:
        return f"takes no part: {printable(card['ended'])}"
    if card["stage"] < 0:
        return f"waiting for {card['waiting_for'] or 'a place in the run'}"
    waits = f", waiting for {card['waiting_for']}" if card["waiting_for"] and not card["busy"] else ""
    return f"part {card['stage'] + 1} of {stages}{waits}"


def limits_in_words(up_bytes_per_s: float | None, down_bytes_per_s: float | None) -> str:
    """The rates that hold now."""
    if up_bytes_per_s is None and down_bytes_per_s is None:
        return "no limits"
    words = [
        "no limit" if rate is None else f"at most {show_rate(rate)}" for rate in (up_bytes_per_s, down_bytes_per_s)
    ]
    return f"{words[0]} up, {words[1]} down"


def describe_limits(values: Mapping[str, str], meanings: Mapping[str, str], width: int) -> str:
    """Every limit with its value, and what it means, none wider than `width` where its words allow that."""
    value_columns = min(20, max(len(value) for value in values.values()))
    lines = []
    for name, value in values.items():
        head = f"{name:11} {value:{value_columns}}  "
        indent = " " * min(len(head), 12 + value_columns + 2)
        wrapper = textwrap.TextWrapper(
            width, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines += wrapper.wrap(meanings[name])
    return "\n".join(lines)


def list_limits(values: Mapping[str, str], width: int) -> str:
    """Every limit with its value, as many beside each other as there is room for."""
    cells = [f"{name:11} {value}" for name, value in values.items()]
    columns = max(1, width // (max(len(cell) for cell in cells) + 2))
    rows = math.ceil(len(cells) / columns)
    each = width // columns
    return "\n".join("".join(f"{cell:{each}}" for cell in cells[row::rows]).rstrip() for row in range(rows))


BARS = "▁▂▃▄▅▆▇█"
CURVE_COLUMNS = 32
NO_SAMPLE = (
    "nothing yet: that comes with the first checkpoint of a trained model of at most 200 M parameters, where servers"
    " share them"
)


def describe_news(news: dict[str, Any]) -> list[str]:
    """How the run goes: the loss so far as bars, what the model writes, and this computer's part."""
    lines = []
    as_of = news.get("as_of", "")  # a daemon that began before an update does not say some of these
    points = [loss for _, loss in news["curve"]]
    if points:
        # The newest point of each column: a column is at most two of the 64 points.
        each = math.ceil(len(points) / CURVE_COLUMNS)
        columns = points[::-1][::each][::-1]
        least, span = min(columns), (max(columns) - min(columns)) or 1.0
        bars = "".join(BARS[round((loss - least) / span * (len(BARS) - 1))] for loss in columns)
        done = news["step"] + 1
        steps = f"{done:,} step{'' if done == 1 else 's'} done"
        when = f", as of {as_of}" if as_of else ""
        lines += _wrap(f"run     {steps}, loss {bars} {points[0]:.2f} to {points[-1]:.2f}{when}")
    if news.get("validated_step", -1) >= 0:
        step = news["validated_step"]
        after = f"{step:,} step{'' if step == 1 else 's'}"
        lines += _wrap(f"tested  loss {news['validation_loss']:.2f} on text kept aside, after {after}")
    if news["sample"]:
        said = printable(" ".join(news["sample"].split()))
        lines += _wrap(f"writes  {said} (after step {news['sample_step']:,})")
    else:
        lines += _wrap(f"writes  {NO_SAMPLE}")
    if news["hour_ratio"] > 0:
        lines += _wrap(f"part    {part_in_words(news['hour_ratio'], news['step'], news['step_tasks'], as_of)}")
    return lines


def _wrap(text: str) -> list[str]:
    """Lines of at most `WIDTH`; what follows is indented."""
    lines, line = [], ""
    for word in [piece for whole in text.split(" ") for piece in _pieces(whole)]:
        if line.strip() and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = f"        {word}"
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line]


def _pieces(word: str) -> list[str]:
    """A word, cut where it is longer than a line has room for."""
    room = WIDTH - 8
    return [word[start : start + room] for start in range(0, len(word), room)] or [""]

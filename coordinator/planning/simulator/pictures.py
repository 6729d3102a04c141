"""Pictures of a timeline: a Gantt chart as SVG and in the terminal, and a Chrome trace for Perfetto.

Colour says which operation it is, its depth which of the node's stages; numbers are microbatches. Below
each row of the SVG stands the node's memory over time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from html import escape

from coordinator.planning.simulator.pipeline import Timeline
from protocol.schedule.ir import Key, Op

#: Operation -> (name, colours of a node's first, second, … stage): told apart by people who see red and
# green alike.
_STYLES = {
    Op.F: ("forward", ("#4477aa", "#77aadd", "#aaccee", "#cce2f5")),
    Op.B: ("backward", ("#cc6633", "#ee9966", "#f5bb99", "#fbdccb")),
    Op.I: ("input gradient", ("#cc6633", "#ee9966", "#f5bb99", "#fbdccb")),
    Op.W: ("weight gradient", ("#ddaa33", "#eecc66", "#f5dd99", "#fbeecc")),
    Op.R: ("recompute", ("#aa4499", "#cc77bb", "#ddaacc", "#eeddee")),
    Op.L: ("loss", ("#228866",)),
}
_OTHER = ("registered operation", ("#666666",))

_TICK, _LETTER = 90, 6.5
"""Pixels between two times on the axis at least, and how wide a letter of them is."""
_FONT, _FONT_LEAST, _DIGIT = 9, 6, 0.58
"""Numbers in bars: the usual and the least size, and how wide a digit is for its height."""
_ROW, _MEMORY, _GAP, _LEFT, _TOP = 22, 16, 6, 64, 46


def svg(
    timeline: Timeline,
    title: str,
    width: int = 960,
    until_s: float | None = None,
    memory_top: float | None = None,
    *,
    row_name: str = "node",
    unit: str = "",
) -> str:
    """The Gantt chart as an SVG document.

    Args:
        until_s, memory_top: the time at the right edge and the memory of a full strip, to compare pictures on one
            scale; the makespan and the highest peak when None.
        row_name: what a row is to the reader, a node or a stage.
        unit: of the times on the axis, where they have one.
    """
    makespan_s = timeline.makespan_s
    scale = (width - _LEFT - 10) / max(until_s or makespan_s, 1e-12)
    nodes = len(timeline.orders)
    pitch = _ROW + _MEMORY + _GAP
    height = _TOP + nodes * pitch + 24
    peaks = timeline.peaks()
    top = memory_top or max(peaks, default=0.0) or 1.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="16" font-size="14" font-weight="bold" fill="#222222">{escape(title)}</text>',
        *_legend(timeline),
    ]
    for node in range(nodes):
        y = _TOP + node * pitch
        lines.append(f'<text x="6" y="{y + 15}" fill="#222222">{row_name} {node}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{makespan_s * scale:.2f}" height="{_ROW}" fill="#eeeeee"/>')
        lines.extend(_bars(timeline, node, y, scale))
        lines.append(_memory_area(timeline, node, y + _ROW + _MEMORY, scale, _MEMORY / top))
        lines.append(f'<text x="6" y="{y + _ROW + _MEMORY}" font-size="9" fill="#666666">peak {peaks[node]:g}</text>')
    end = _LEFT + makespan_s * scale
    bottom = _TOP + nodes * pitch
    lines.append(f'<line x1="{end:.2f}" y1="{_TOP - 4}" x2="{end:.2f}" y2="{bottom}" stroke="#222222"/>')
    lines.extend(_axis(makespan_s, scale, bottom, f" {unit}" if unit else ""))
    lines.append("</svg>\n")
    return "\n".join(lines)


def _axis(makespan_s: float, scale: float, bottom: float, unit: str) -> Iterator[str]:
    """Round times from 0 on, and the makespan; a time that would touch the makespan's number is left out."""
    last = f"{makespan_s:.4g}{unit}"
    end = _LEFT + makespan_s * scale
    step = _round_up(_TICK / scale)
    for number in range(int(makespan_s / step) + 1):
        x = _LEFT + number * step * scale
        text = f"{number * step:.4g}{unit}"
        if x + _LETTER * len(text) / 2 < end - _LETTER * (len(last) + 1):
            yield f'<line x1="{x:.2f}" y1="{bottom - _GAP}" x2="{x:.2f}" y2="{bottom}" stroke="#888888"/>'
            yield f'<text x="{x:.2f}" y="{bottom + 14}" text-anchor="middle" fill="#666666">{text}</text>'
    yield f'<text x="{end:.2f}" y="{bottom + 14}" text-anchor="end" fill="#222222">{last}</text>'


def _round_up(value: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that is not below `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _legend(timeline: Timeline) -> Iterator[str]:
    present = {key.op for key in timeline.graph.keys}
    x = _LEFT
    for op, (name, colours) in [*_STYLES.items(), (Op.CUSTOM, _OTHER)]:
        if op in present:
            yield f'<rect x="{x}" y="26" width="10" height="10" fill="{colours[0]}"/>'
            yield f'<text x="{x + 14}" y="35" fill="#444444">{name}</text>'
            x += 24 + 6 * len(name)
    yield f'<rect x="{x}" y="26" width="10" height="10" fill="#bbbbbb"/>'
    yield f'<text x="{x + 14}" y="35" fill="#444444">memory held</text>'
    if any(len(_chunks(timeline, node)) > 1 for node in range(len(timeline.orders))):
        yield f'<text x="{x + 98}" y="35" fill="#444444">paler: further stages</text>'


def _chunks(timeline: Timeline, node: int) -> dict[int, int]:
    stages = sorted({timeline.graph.stages[task] for task in timeline.orders[node]})
    return {stage: number for number, stage in enumerate(stages)}


def _bars(timeline: Timeline, node: int, y: float, scale: float) -> Iterator[str]:
    chunks = _chunks(timeline, node)
    for task in timeline.orders[node]:
        key = timeline.graph.keys[task]
        start, end = timeline.start_s[task], timeline.end_s[task]
        x, wide = _LEFT + start * scale, max((end - start) * scale, 0.3)
        _, colours = _STYLES.get(key.op, _OTHER)
        chunk = min(chunks[timeline.graph.stages[task]], len(colours) - 1)
        label = _label(key)
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" fill="{colours[chunk]}"'
            f' stroke="#ffffff" stroke-width="0.6">'
            f"<title>{escape(str(key))} {start:g} to {end:g}</title></rect>"
        )
        size = _font(wide, label)
        if size is None:  # of many segments each bar at least says whose it is
            label = str(key.microbatch)
            size = _font(wide, label)
        if size is not None:
            ink = "#ffffff" if chunk == 0 and key.op is not Op.W else "#222222"
            yield (
                f'<text x="{x + wide / 2:.2f}" y="{y + 15}" text-anchor="middle" font-size="{size:.3g}"'
                f' fill="{ink}">{label}</text>'
            )


def _font(wide: float, label: str) -> float | None:
    """The size in which a label fits into a bar, or None."""
    size = min(_FONT, (wide - 0.6) / (_DIGIT * len(label)))
    return size if size >= _FONT_LEAST else None


def _label(key: Key) -> str:
    return f"{key.microbatch}.{key.segment}" if key.segment else str(key.microbatch)


def memory_steps(timeline: Timeline, node: int) -> list[tuple[float, float]]:
    """The node's memory over time: (time, what is held from then on), starting at (0, 0)."""
    graph = timeline.graph
    changes = []
    for task, at in enumerate(graph.nodes):
        if at == node:
            changes.append((timeline.end_s[task], 0, graph.memory_end[task]))
            changes.append((timeline.start_s[task], 1, graph.memory_start[task]))
    steps, held = [(0.0, 0.0)], 0.0
    for at_s, _, change in sorted(changes):
        if change:
            held += change
            steps.append((at_s, held))
    return steps


def _memory_area(timeline: Timeline, node: int, base: float, scale: float, per_unit: float) -> str:
    path, before = [f"M{_LEFT} {base}"], 0.0
    for at_s, held in memory_steps(timeline, node):
        x = _LEFT + at_s * scale
        path.append(f"L{x:.2f} {base - before * per_unit:.2f} L{x:.2f} {base - held * per_unit:.2f}")
        before = held
    path.append(f"L{_LEFT + timeline.makespan_s * scale:.2f} {base} Z")
    return f'<path d="{" ".join(path)}" fill="#bbbbbb"/>'


#: ANSI background per operation, first and further stages of a node.
_ANSI = {Op.F: (44, 104), Op.B: (41, 101), Op.I: (41, 101), Op.W: (43, 103), Op.R: (45, 105), Op.L: (42, 102)}


def terminal(timeline: Timeline, width: int = 100, colour: bool = True) -> str:
    """The Gantt chart as text: one line per node, a dot where it waits, its microbatch where it works.

    Without colour the operation's letter stands first (lower case for a node's further stages).
    """
    scale = width / max(timeline.makespan_s, 1e-12)
    lines = []
    for node, order in enumerate(timeline.orders):
        chunks = _chunks(timeline, node)
        cells = ["·"] * width
        for task in order:
            key = timeline.graph.keys[task]
            first = min(width - 1, round(timeline.start_s[task] * scale))
            last = max(first + 1, min(width, round(timeline.end_s[task] * scale)))
            further = chunks[timeline.graph.stages[task]] > 0
            letter = key.op.value[0].lower() if further else key.op.value[0]
            text = str(key.microbatch) if colour else letter + str(key.microbatch)
            shown = text[: last - first].ljust(last - first)
            for offset, character in enumerate(shown):
                codes = _ANSI.get(key.op, (100, 100))
                code = codes[1 if further else 0]
                cells[first + offset] = f"\x1b[30;{code}m{character}\x1b[0m" if colour else character
        lines.append(f"{node:>4} {''.join(cells)}")
    return "\n".join(lines)


def legend(timeline: Timeline, colour: bool = True) -> str:
    """What the letters or colours of `terminal` mean, in one line, for the operations that occur."""
    present = {timeline.graph.keys[task].op for order in timeline.orders for task in order}
    names = []
    for op, (name, _) in [*_STYLES.items(), (Op.CUSTOM, _OTHER)]:
        if op in present:
            mark = f"\x1b[30;{_ANSI.get(op, (100,))[0]}m \x1b[0m" if colour else op.value[0]
            names.append(f"{mark} {name}")
    if any(len(_chunks(timeline, node)) > 1 for node in range(len(timeline.orders))):
        names.append("brighter: further stages" if colour else "small: further stages")
    return "     " + ", ".join([*names, "· waiting, numbers: microbatches"])


def chrome_trace(timeline: Timeline, title: str, ticks_per_s: float = 1e6) -> str:
    """A trace in Chrome's JSON format: a thread per node, a counter for its memory. Opens in Perfetto.

    Args:
        ticks_per_s: microseconds per second of the timeline; more where its unit is not the second.
    """
    graph = timeline.graph
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": node, "args": {"name": f"node {node}"}}
            for node in range(len(timeline.orders))
        ),
    ]
    for task, key in enumerate(graph.keys):
        name, _ = _STYLES.get(key.op, (key.name or key.op.value, ()))
        events.append(
            {
                "ph": "X",
                "name": str(key),
                "cat": name,
                "pid": 0,
                "tid": graph.nodes[task],
                "ts": timeline.start_s[task] * ticks_per_s,
                "dur": (timeline.end_s[task] - timeline.start_s[task]) * ticks_per_s,
                "args": {"microbatch": key.microbatch, "position": key.position, "segment": key.segment},
            }
        )
    for node in range(len(timeline.orders)):
        for at_s, held in memory_steps(timeline, node):
            events.append(
                {
                    "ph": "C",
                    "name": f"memory of node {node}",
                    "pid": 0,
                    "ts": at_s * ticks_per_s,
                    "args": {"held": round(held, 9)},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

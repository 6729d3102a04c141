"""A trace as a picture: the devices of each stage over the last steps, predicted above measured, on one scale."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from coordinator.world.traces import NodeSpans, Side, Trace
from protocol.run.spans import KINDS

COLOURS = {
    "forward": "#4477aa", "backward": "#cc6633", "loss": "#228866", "validation": "#66ccee", "gradient": "#ddaa33",
    "load": "#aa4499", "set up": "#888888",
}  # fmt: skip
"""As the planners' pictures have them: told apart by people who see red and green alike."""
STEPS_SHOWN = 4
"""Of both sides, the newest: more are too thin to see."""
NODES_SHOWN = 48
"""Rows of each side: of more nodes the first of each stage in turn."""
BARS_MAX = 4000
"""Of one row: a page must stay light."""
_LEFT, _TOP, _ROW, _GAP, _BLOCK = 170, 54, 14, 3, 44


def trace_svg(trace: Trace, width: int = 1100) -> str:
    """The picture as an SVG document."""
    sides = [("measured", trace.measured)]
    if trace.predicted is not None:
        sides.insert(0, ("predicted", trace.predicted))
    shown = [(name, side, *_last(side)) for name, side in sides]
    longest = max((end - begin for _, _, begin, end in shown), default=0.0) or 1.0
    scale = (width - _LEFT - 20) / longest
    rows = [_rows(side) for _, side, _, _ in shown]
    height = _TOP + sum(_BLOCK + len(nodes) * (_ROW + _GAP) for nodes in rows) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-size="14" font-weight="bold" fill="#222222">{escape(_title(trace))}</text>',
        *_legend(),
    ]
    y = _TOP
    for (name, side, begin, end), nodes in zip(shown, rows, strict=True):
        words = f"{name}: {side.step_s:.3f} s a step, bubble {side.bubble():.0%}" if side.step_s else f"{name}: no step"
        lines.append(f'<text x="8" y="{y + 10}" font-weight="bold" fill="#222222">{escape(words)}</text>')
        y += _BLOCK - 6
        top = y
        for node in nodes:
            lines.append(f'<text x="8" y="{y + 11}" fill="#444444">{escape(node.label)}</text>')
            wide = (end - begin) * scale
            lines.append(f'<rect x="{_LEFT}" y="{y}" width="{wide:.1f}" height="{_ROW}" fill="#eeeeee"/>')
            lines.extend(_bars(node, y, begin, end, scale))
            y += _ROW + _GAP
        for number, at_s in side.steps:
            if begin <= at_s <= end + 1e-9:
                x = _LEFT + (at_s - begin) * scale
                lines.append(f'<line x1="{x:.1f}" y1="{top - 8}" x2="{x:.1f}" y2="{y}" stroke="#222222"/>')
                lines.append(f'<text x="{x:.1f}" y="{top - 10}" text-anchor="end" fill="#222222">{number + 1}</text>')
        y += 6
    lines.append(
        f'<text x="{_LEFT}" y="{y + 8}" fill="#666666">{longest:.3g} s in all; lines: a step has closed</text>'
    )
    lines.append("</svg>\n")
    return "\n".join(lines)


def _title(trace: Trace) -> str:
    if trace.predicted is None:
        return f"{trace.run}: {trace.no_prediction}"
    if not trace.measured.step_s:
        return f"{trace.run}: predicted over measured"
    off = trace.predicted.step_s / trace.measured.step_s - 1
    return f"{trace.run}: predicted over measured, {off:+.0%} off"


def _last(side: Side) -> tuple[float, float]:
    """The newest steps: from when to when."""
    closes = [at_s for _, at_s in side.steps][-(STEPS_SHOWN + 1) :]
    return (closes[0], closes[-1]) if len(closes) > 1 else (0.0, 0.0)


def _rows(side: Side) -> list[NodeSpans]:
    """Devices, stage by stage; of very many some of each stage."""
    nodes = sorted(side.computing(), key=lambda node: (node.stage, node.node))
    if len(nodes) <= NODES_SHOWN:
        return nodes
    seen: dict[int, int] = {}
    each = max(1, NODES_SHOWN // len({node.stage for node in nodes}))
    kept = []
    for node in nodes:
        seen[node.stage] = seen.get(node.stage, 0) + 1
        if seen[node.stage] <= each:
            kept.append(node)
    return kept[:NODES_SHOWN]


def _bars(node: NodeSpans, y: float, begin: float, end: float, scale: float) -> Iterator[str]:
    records = node.of(*COLOURS)
    for record in records[-BARS_MAX:]:
        start, stop = float(record["start"]), float(record["start"] + record["seconds"])
        if stop <= begin or start >= end:
            continue
        start, stop = max(start, begin), min(stop, end)
        kind = KINDS[record["kind"]]
        words = f"{kind} {record['microbatch']}" if record["microbatch"] >= 0 else kind
        yield (
            f'<rect x="{_LEFT + (start - begin) * scale:.1f}" y="{y}" width="{max(0.4, (stop - start) * scale):.1f}"'
            f' height="{_ROW}" fill="{COLOURS[kind]}"><title>{words}: {stop - start:.4g} s</title></rect>'
        )


def _legend() -> Iterator[str]:
    x = 8.0
    for kind, colour in COLOURS.items():
        yield f'<rect x="{x}" y="28" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="37" fill="#444444">{kind}</text>'
        x += 30 + 6.5 * len(kind)

"""The map of a placement as SVG: stages from left to right, servers by role, volunteers below them."""

from __future__ import annotations

from html import escape

from coordinator.names import short
from coordinator.placement.run_plan import RunPlan

_WIDTH, _PAD, _GAP, _ROW, _TOP = 190, 24, 76, 17, 64
_HOP = 34
"""How far below the first line of text the arrows are."""
_VOLUNTEERS_SHOWN = 14


def map_svg(plan: RunPlan) -> str:
    """Boxes of stages with their layers and members; an arrow carries the seconds of its hop."""
    tallest = max(len(_rows(plan, k)) for k in range(len(plan.stages)))
    box = max(tallest * _ROW, _HOP) + 16
    height = _TOP - 20 + box + _PAD
    # The title is longer than one box is wide.
    width = max(2 * _PAD + len(plan.stages) * (_WIDTH + _GAP) - _GAP, 580)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_PAD}" y="26" font-size="15">{len(plan.stages)} stage{"s" if len(plan.stages) > 1 else ""}, '
        f"{plan.tokens_per_s:,.0f} tokens per second; the red stage sets the pace</text>",
    ]
    pace = plan.found.placement.worst
    for k, cost in enumerate(plan.costs):
        x = _PAD + k * (_WIDTH + _GAP)
        edge = "#cc3311" if k == pace else "#4477aa"
        lines.append(
            f'<rect x="{x}" y="{_TOP - 20}" width="{_WIDTH}" height="{box}" rx="6" fill="#f4f7fa" '
            f'stroke="{edge}" stroke-width="2"/>'
        )
        for row, (text, colour) in enumerate(_rows(plan, k)):
            lines.append(f'<text x="{x + 8}" y="{_TOP + row * _ROW}" fill="{colour}">{text}</text>')
        if cost.hop_out_s:
            lines.append(
                f'<text x="{x + _WIDTH + _GAP / 2:g}" y="{_TOP + _HOP - 8}" text-anchor="middle" fill="#555555">'
                f"{cost.hop_out_s:.3g} s</text>"
                f'<path d="M {x + _WIDTH + 6} {_TOP + _HOP} h {_GAP - 12} l -6 -4 m 6 4 l -6 4" fill="none" '
                f'stroke="#555555"/>'
            )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _rows(plan: RunPlan, k: int) -> list[tuple[str, str]]:
    """The lines of text in a stage's box, each with its colour."""
    machines, servers, stage = plan.network.machines, plan.network.servers, plan.stages[k]
    first, end = plan.edges[k], plan.edges[k + 1]
    rows = [(f"stage {k}: blocks {first} to {end - 1}", "#000000")]
    rows += [(f"front  {_name(machines[j].name)}", "#117733") for j in stage.front]
    rows += [(f"back  {_name(machines[j].name)}", "#882255") for j in stage.back]
    volunteers = sorted(stage.volunteers)
    rows += [(_name(machines[servers + v].name), "#555555") for v in volunteers[:_VOLUNTEERS_SHOWN]]
    if len(volunteers) > _VOLUNTEERS_SHOWN:
        rows.append((f"and {len(volunteers) - _VOLUNTEERS_SHOWN} more", "#555555"))
    return rows


def _name(name: str) -> str:
    name = short(name)
    return escape(name if len(name) <= 24 else name[:23] + "…")

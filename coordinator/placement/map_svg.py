"""The map of a placement as SVG: stages from left to right, servers by role, volunteers below them."""

from __future__ import annotations

from html import escape

from coordinator.placement.run_plan import RunPlan

_WIDTH, _PAD, _ROW, _TOP = 190, 24, 17, 64
_VOLUNTEERS_SHOWN = 14


def map_svg(plan: RunPlan) -> str:
    """Boxes of stages with their layers and members; an arrow carries the seconds of its hop."""
    machines = plan.network.machines
    servers = plan.network.servers
    tallest = max(len(s.servers) + min(len(s.volunteers), _VOLUNTEERS_SHOWN) for s in plan.stages)
    height = _TOP + (tallest + 4) * _ROW + 40
    width = len(plan.stages) * (_WIDTH + _PAD) + _PAD
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_PAD}" y="26" font-size="15">{len(plan.stages)} stages, '
        f"{plan.tokens_per_s:,.0f} tokens per second; the red stage sets the pace</text>",
    ]
    pace = plan.found.placement.worst
    for k, (stage, cost) in enumerate(zip(plan.stages, plan.costs, strict=True)):
        x = _PAD + k * (_WIDTH + _PAD)
        edge = "#cc3311" if k == pace else "#4477aa"
        lines.append(
            f'<rect x="{x}" y="{_TOP - 20}" width="{_WIDTH}" height="{height - _TOP}" rx="6" fill="#f4f7fa" '
            f'stroke="{edge}" stroke-width="2"/>'
        )
        first, end = plan.edges[k], plan.edges[k + 1]
        rows = [(f"stage {k}: blocks {first} to {end - 1}", "#000000")]
        rows += [(f"front  {_name(machines[j].name)}", "#117733") for j in stage.front]
        rows += [(f"back  {_name(machines[j].name)}", "#882255") for j in stage.back]
        volunteers = sorted(stage.volunteers)
        rows += [(_name(machines[servers + v].name), "#555555") for v in volunteers[:_VOLUNTEERS_SHOWN]]
        if len(volunteers) > _VOLUNTEERS_SHOWN:
            rows.append((f"and {len(volunteers) - _VOLUNTEERS_SHOWN} more", "#555555"))
        for row, (text, colour) in enumerate(rows):
            lines.append(f'<text x="{x + 8}" y="{_TOP + row * _ROW}" fill="{colour}">{text}</text>')
        if cost.hop_out_s:
            lines.append(
                f'<text x="{x + _WIDTH + _PAD / 2}" y="{_TOP - 26}" text-anchor="middle" fill="#555555">'
                f"{cost.hop_out_s:.3g} s</text>"
                f'<path d="M {x + _WIDTH} {_TOP - 8} h {_PAD - 6} l -6 -4 m 6 4 l -6 4" fill="none" stroke="#555555"/>'
            )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _name(name: str) -> str:
    return escape(name if len(name) <= 24 else name[:23] + "…")

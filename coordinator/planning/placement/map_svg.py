"""The map of a placement as SVG: stages from left to right, servers by role, volunteers below them."""

from __future__ import annotations

from collections import Counter
from html import escape

from coordinator.planning.names import short
from coordinator.planning.placement.run_plan import RunPlan
from protocol.schedule.profile import Machine

_WIDTH, _PAD, _GAP, _ROW, _TOP = 190, 24, 76, 17, 64
_HOP = 34
"""How far below the first line of text the arrows are."""
_VOLUNTEERS_SHOWN = 14


def map_svg(plan: RunPlan) -> str:
    """Boxes of stages with their layers and members; an arrow carries the seconds of its hop."""
    stages = plan.plan.stages
    tallest = max(len(_rows(plan, k)) for k in range(len(stages)))
    box = max(tallest * _ROW, _HOP) + 16
    height = _TOP - 20 + box + _PAD
    # The title is longer than one box is wide.
    width = max(2 * _PAD + len(stages) * (_WIDTH + _GAP) - _GAP, 580)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_PAD}" y="26" font-size="15">{len(stages)} stage{"s" if len(stages) > 1 else ""}, '
        f"{plan.tokens_per_s:,.0f} tokens per second; the red stage sets the pace</text>",
    ]
    pace = plan.plan.worst
    hops_s = [hop / plan.sizes.microbatches for hop in plan.plan.hops_s]
    for k in range(len(stages)):
        x = _PAD + k * (_WIDTH + _GAP)
        edge = "#cc3311" if k == pace else "#4477aa"
        lines.append(
            f'<rect x="{x}" y="{_TOP - 20}" width="{_WIDTH}" height="{box}" rx="6" fill="#f4f7fa" '
            f'stroke="{edge}" stroke-width="2"/>'
        )
        for row, (text, colour) in enumerate(_rows(plan, k)):
            lines.append(f'<text x="{x + 8}" y="{_TOP + row * _ROW}" fill="{colour}">{text}</text>')
        if k < len(hops_s):
            lines.append(
                f'<text x="{x + _WIDTH + _GAP / 2:g}" y="{_TOP + _HOP - 8}" text-anchor="middle" fill="#555555">'
                f"{hops_s[k]:.3g} s</text>"
                f'<path d="M {x + _WIDTH + 6} {_TOP + _HOP} h {_GAP - 12} l -6 -4 m 6 4 l -6 4" fill="none" '
                f'stroke="#555555"/>'
            )
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _rows(plan: RunPlan, k: int) -> list[tuple[str, str]]:
    """The lines of text in a stage's box, each with its colour: servers with their sites, volunteers by site."""
    machines, servers, stage = plan.network.machines, plan.network.servers, plan.plan.stages[k]
    pace = plan.plan.paces[k].pace_s
    rows = [
        (f"stage {k}: blocks {stage.first_block} to {stage.end_block - 1}", "#000000"),
        (f"a step takes {pace:.3g} s here", "#000000"),
    ]
    rows += [(f"front  {_placed(machines[j])}", "#117733") for j in stage.front]
    rows += [(f"back  {_placed(machines[j])}", "#882255") for j in stage.back]
    volunteers = [machines[servers + v] for v in sorted(stage.volunteers)]
    if len(volunteers) <= _VOLUNTEERS_SHOWN:
        return rows + [(_placed(machine), "#555555") for machine in volunteers]
    rows.append((f"{len(volunteers)} volunteers:", "#555555"))
    sites = Counter(machine.site or "" for machine in volunteers).most_common()
    shown = [(site, number) for site, number in sites if site and number > 1][: _VOLUNTEERS_SHOWN - 2]
    rows += [(f"{number} at {_name(site)}", "#555555") for site, number in shown]
    if rest := len(volunteers) - sum(number for _, number in shown):
        rows.append((f"{rest} at places of their own" if shown else f"{rest} each at a place of its own", "#555555"))
    return rows


def _placed(machine: Machine) -> str:
    """A machine's name with its site, where the name does not say it."""
    if machine.site and machine.site not in machine.name:
        return f"{_name(machine.name)} ({_name(machine.site)})"
    return _name(machine.name)


def _name(name: str) -> str:
    name = short(name)
    return escape(name if len(name) <= 24 else name[:23] + "…")

"""The picture of a simulated run: what the volunteers of each stage did over time, and when steps closed."""

from __future__ import annotations

from html import escape

from coordinator.world.figures import crew_of
from coordinator.world.swarm import Swarm

_LEFT, _TOP, _ROW, _GAP, _WIDTH, _RIGHT = 70, 64, 44, 10, 900, 130
COLOURS = {"computes": "#4477aa", "sends": "#ddaa33", "receives": "#66ccee", "waits": "#dddddd"}
"""Told apart by people who see red and green alike."""


def picture(swarm: Swarm) -> str:
    """An SVG document. From the bottom of each row: computes, sends, receives; what is left waits. A line is a step."""
    moments, stages = swarm.moments, swarm.config.stages.count
    end_s = max(swarm.world.now, 1e-9)
    width = _LEFT + _WIDTH + _RIGHT
    height = _TOP + stages * (_ROW + _GAP) + 30
    title = f"{swarm.config.name}: {len(swarm.steps)} steps in {end_s / 3600:.2f} simulated hours"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15" fill="#222222">{escape(title)}</text>',
    ]
    for place, (what, colour) in enumerate(COLOURS.items()):
        begin = _LEFT + 110 * place
        lines.append(f'<rect x="{begin}" y="32" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{begin + 18}" y="42" fill="#222222">{what}</text>')
    bar = _WIDTH / max(1, len(moments))
    for stage in range(stages):
        top = _TOP + stage * (_ROW + _GAP)
        lines.append(f'<text x="8" y="{top + _ROW / 2 + 4:g}" fill="#222222">stage {stage}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="{COLOURS["waits"]}"/>')
        for number, moment in enumerate(moments):
            asked = moment.by_stage[stage].total()
            bottom = float(top + _ROW)
            for what in ("computes", "sends", "receives"):
                tall = _ROW * moment.by_stage[stage][what] / asked if asked else 0.0
                bottom -= tall
                if tall > 0:
                    lines.append(
                        f'<rect x="{_LEFT + number * bar:.1f}" y="{bottom:.1f}" width="{bar + 0.2:.1f}"'
                        f' height="{tall:.1f}" fill="{COLOURS[what]}"/>'
                    )
        crew = f"{crew_of(moments, stage):.1f} volunteers"
        lines.append(f'<text x="{_LEFT + _WIDTH + 8}" y="{top + _ROW / 2 + 4:g}" fill="#222222">{crew}</text>')
    bottom_y = _TOP + stages * (_ROW + _GAP) - _GAP
    for step in swarm.steps if len(swarm.steps) <= 400 else ():
        x = _LEFT + _WIDTH * step.at_s / end_s
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom_y}" stroke="#222222"/>')
    for part in range(5):
        x = _LEFT + _WIDTH * part / 4
        text = f"{end_s * part / 4:.0f} s"
        lines.append(f'<text x="{x:.0f}" y="{bottom_y + 18}" text-anchor="middle" fill="#555555">{text}</text>')
    lines.append("</svg>\n")
    return "\n".join(lines)

"""`barnraise schedule gallery FOLDER`: the page of known schedules, its pictures and its table, in one go.

`coordinator/README.md` and `coordinator/pictures/` are what it makes; a test holds them to it.
"""

from __future__ import annotations

from pathlib import Path

import click

from coordinator.planning.schedules import KNOWN, known_design
from coordinator.planning.simulator.links import Network
from coordinator.planning.simulator.pictures import svg
from coordinator.planning.simulator.pipeline import Timeline
from coordinator.planning.simulator.report import report
from protocol.base.errors import BadInputError

NODES, MICROBATCHES, LINK_S = 4, 8, 0.1

#: Name -> what to look for in its picture.
PICTURED = {
    "gpipe": "All forwards, then all backwards: every microbatch is in memory at the turn.",
    "1f1b": "GPipe's bubble with half its memory: each backward frees the place for a forward.",
    "interleaved-1f1b": "Two stages a node (paler: the second): the bubble halves, and more is in flight.",
    "zero-bubble-h1": "Backwards are split; the weight gradient (yellow) waits for nobody and fills the bubble.",
    "v-shape": "Down the nodes and up again, split: the last loss and the first embedding share a node.",
    "seq1f1b": "Microbatches in four segments of tokens: the pipeline fills with quarters, and holds quarters.",
}

_START, _END = "<!-- made by `barnraise schedule gallery`: begin -->", "<!-- end -->"


@click.command("gallery")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def gallery(folder: Path) -> None:
    """Write FOLDER/pictures/*.svg and the page of schedules in FOLDER/README.md."""
    pictures = folder / "pictures"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        for name, text in drawings().items():
            (pictures / f"{name}.svg").write_text(text)
        page = folder / "README.md"
        before = page.read_text() if page.exists() else f"# Coordinator\n\n{_START}\n{_END}\n"
        page.write_text(replaced(before))
    except OSError as error:
        raise BadInputError(f"FOLDER: {error.filename or folder}: {error.strerror}") from error
    click.echo(f"wrote {len(PICTURED)} pictures and the page in {folder}")


def drawings() -> dict[str, str]:
    """Every picture's SVG, on one scale."""
    timelines = {name: _timeline(name, LINK_S) for name in PICTURED}
    until_s = max(timeline.makespan_s for timeline in timelines.values())
    memory_top = max(max(timeline.peaks()) for timeline in timelines.values())
    return {name: svg(timeline, name, 640, until_s, memory_top) for name, timeline in timelines.items()}


def replaced(page: str) -> str:
    """The page with what stands between the marks made anew. Raises `BadInputError` when a mark is missing."""
    head, start, rest = page.partition(_START)
    _, end, tail = rest.partition(_END)
    if not start or not end:
        raise BadInputError(f"FOLDER: README.md has no part between {_START!r} and {_END!r}")
    return f"{head}{_START}\n{_pictures()}\n{_table()}\n{_END}{tail}"


def _timeline(name: str, link_s: float) -> Timeline:
    return known_design(name, NODES, MICROBATCHES).timeline(network=Network.uniform(NODES, link_s))


def _pictures() -> str:
    lines = ["<table>"]
    names = list(PICTURED)
    for left, right in zip(names[::2], names[1::2], strict=True):
        lines.append("<tr>")
        lines += [
            f'<td width="50%"><img src="pictures/{name}.svg" alt="{name}: time from left to right, a row per node">'
            f"<br>{PICTURED[name]}</td>"
            for name in (left, right)
        ]
        lines.append("</tr>")
    return "\n".join([*lines, "</table>", ""])


def _table() -> str:
    lines = [
        f"{NODES} nodes, {MICROBATCHES} microbatches; a node's share of one takes F = 1 and B = 2 (split: 1 and 1)."
        f" Peak in microbatches, on the worst node; links as latency of each hop.",
        "",
        f"| schedule | makespan, no latency | bubbles | makespan, links of {LINK_S:g} | bubbles | peak memory |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in KNOWN:
        found = [report(_timeline(name, link_s)) for link_s in (0.0, LINK_S)]
        cells = [f"{r.makespan_s:.2f} | {r.bubble_ratio:.0%}" for r in found]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(found[1].peaks):.2f} |")
    return "\n".join(lines)

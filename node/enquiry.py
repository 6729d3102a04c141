"""What a volunteer is told before it says yes: this machine, the run, and what taking part costs an hour.

The run is asked of its coordinator by a visit (`node.survey`), which also measures the line to the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import trio

from node.compute.layout import StageLayout
from node.compute.probe import probe
from node.daemon import NodeState
from node.journal import open_journal
from node.links.assemble import WayOptions
from node.meter import Figures
from node.survey import WAYS, Reached, Survey, best_stage, survey
from protocol.drive.limits import LineLimits
from protocol.ids import NodeId
from protocol.limits import FORM_ITEM_BYTES
from protocol.membership import JoinLink
from protocol.run import RunConfig

GUESSED_VOCABULARY = 257
"""The byte tokenizer's, while no server has read the data."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the person is asked about, and what was found out for it."""

    text: str
    tokens_per_s: float
    """0 when it was not measured."""
    measured: tuple[tuple[NodeId, str, Figures], ...] = ()
    """(server, path, figures) of the links."""
    stage: int = -1
    """The stage to whose servers the line is best, or -1."""
    finished: bool = False
    """There is nothing left to do."""


def enquire(
    link: JoinLink, folder: Path, threads: int, measure: bool, line: LineLimits, ways: WayOptions | None = None
) -> Offer:
    """Visits the run and measures this machine and its line (seconds). Raises `BadInputError` when nobody answers."""
    journal = open_journal(folder)
    try:
        state = NodeState(folder, link, journal)
        found = trio.run(_survey, link, state, line, ways or WayOptions(), measure)
    finally:
        journal.close()
    if found.finished:
        return Offer(
            f"The run {found.welcome.config.name} is finished: there is nothing left to do.", 0.0, finished=True
        )
    config, vocabulary = found.welcome.config, found.welcome.vocabulary or GUESSED_VOCABULARY
    tokens_per_s = measure_stage(config, vocabulary, threads) if measure else 0.0
    text = describe(config, vocabulary, threads, tokens_per_s, found.servers, line)
    return Offer(text, tokens_per_s, found.measured, best_stage(found.servers))


async def _survey(link: JoinLink, state: NodeState, line: LineLimits, ways: WayOptions, measure: bool) -> Survey:
    return await survey(link, state, line, ways, tell=click.echo, measure=measure)


def measure_stage(config: RunConfig, vocabulary: int, threads: int) -> float:
    """Tokens a second through a stage's share of the layers, forward and backward."""
    layers = max(1, round(config.model.layers / config.stages.count))
    return probe(config, vocabulary, first_block=1, end_block=1 + 2 * layers, threads=threads).tokens_per_s


def describe(
    config: RunConfig,
    vocabulary: int,
    threads: int,
    tokens_per_s: float,
    servers: Sequence[Reached] = (),
    line: LineLimits | None = None,
) -> str:
    """The lines that the person reads. All figures are measured, or follow from the run's own numbers."""
    parameters = StageLayout.whole(config, vocabulary).parameter_count
    free_gib = psutil.virtual_memory().available / 2**30
    lines = [
        "This machine",
        f"  processor  {psutil.cpu_count()} threads, {threads} lent",
        f"  memory     {free_gib:.1f} GB free",
    ]
    if tokens_per_s:
        lines.append(f"  speed      {tokens_per_s:,.0f} tokens/s on one stage of this run")
    if servers:
        lines.append(f"  line       {describe_line(servers)}")
    lines += [
        f"The run: {config.name}, a LLaMA of {parameters / 1e6:.1f} M parameters in {config.stages.count} stages, "
        f"{config.steps} steps of {config.step_tokens:,} tokens.",
        "It will send you weights and activations, never code.",
    ]
    if tokens_per_s:
        lines += describe_traffic(config, parameters, tokens_per_s, servers, line or LineLimits())
    lines.append("Ctrl-C finishes what is being computed and leaves.")
    return "\n".join(lines)


def describe_line(servers: Sequence[Reached]) -> str:
    """How many servers are reached, by which ways, and how fast."""
    linked = [server for server in servers if server.path]
    ways = ", ".join(f"{count} {WAYS[path]}" for path, count in Counter(server.path for server in linked).items())
    text = f"{len(linked)} of {len(servers)} servers reached" + (f" ({ways})" if linked else "")
    figures = [server.figures for server in linked if server.figures is not None]
    if figures:
        up, down = max(f.sent_bytes_per_s for f in figures), max(f.received_bytes_per_s for f in figures)
        trips = sorted(f.round_trip_s for f in figures)
        text += f", {8e-6 * up:.1f} Mbit/s up" if up else ", up not measured"
        text += f", {8e-6 * down:.1f}{'' if up else ' Mbit/s'} down" if down else ", down not measured"
        text += f", round trip {1000 * trips[len(trips) // 2]:.0f} ms"
    if len(linked) < len(servers):
        text += "; `barnraise netcheck` tells more"
    return text


def describe_traffic(
    config: RunConfig, parameters: int, tokens_per_s: float, servers: Sequence[Reached], line: LineLimits
) -> list[str]:
    """What an hour costs at most, what it consists of, what holds it down, and how to hold it lower."""
    traffic = bytes_per_token(config, parameters)
    hour = tokens_per_s * 3600 / 1e9
    parts_up = {f"weight gradients in {config.wire.gradients}": traffic.gradients * hour}
    parts_down = {"parameters": traffic.parameters * hour}
    parts_up["activations"] = parts_down["activations"] = 2 * traffic.activations * hour
    figures = [server.figures for server in servers if server.figures is not None]
    lines = []
    for word, parts, measured, limit in (
        ("up", parts_up, [f.sent_bytes_per_s for f in figures], line.up_mbit_per_s),
        ("down", parts_down, [f.received_bytes_per_s for f in figures], line.down_mbit_per_s),
    ):
        wanted = sum(parts.values())
        bounds = [(wanted, "this machine's speed, alone in its stage")]
        if any(measured):
            bounds.append((max(measured) * 3.6e-6, "your line"))
        if limit is not None:
            bounds.append((limit * 0.45, f"your --limit-{word}"))
        most, why = min(bounds)
        main, share = max(((name, part / wanted) for name, part in parts.items()), key=lambda pair: pair[1])
        lines.append(f"  {word:5} at most {most:.1f} GB an hour, set by {why}; {100 * share:.0f} % of it {main}")
    lines.insert(0, "What it moves")
    if line.quota_gb is not None:
        lines.append(f"  Your --quota stops it for the month after {line.quota_gb:g} GB, both ways together.")
    if line == LineLimits():
        lines.append("  To lend less of the line: --limit-up 5 --limit-down 20 (Mbit/s), --quota 200 (GB a month).")
    return lines


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes for each token that a volunteer works on without a pause, alone in its stage."""

    activations: float
    """Each way, and once more: the gradient of an activation has its size."""
    gradients: float
    """Up: a stage's gradient for each contribution."""
    parameters: float
    """Down: a stage's parameters for each step."""


def bytes_per_token(config: RunConfig, parameters: int) -> Traffic:
    """What the run's own numbers say of a volunteer's transfers."""
    wire = config.wire
    stage = parameters / config.stages.count
    contribution_tokens = config.limits.contribution_tasks * config.batch.samples * config.model.context
    return Traffic(
        activations=config.model.hidden * FORM_ITEM_BYTES[wire.activations],
        gradients=stage * FORM_ITEM_BYTES[wire.gradients] / contribution_tokens,
        parameters=stage * FORM_ITEM_BYTES[wire.parameters] / config.step_tokens,
    )


def gigabytes_per_hour(config: RunConfig, parameters: int, tokens_per_s: float) -> tuple[float, float]:
    """(up, down) of a volunteer that works without a pause, alone in its stage, on a line without end."""
    traffic = bytes_per_token(config, parameters)
    up, down = 2 * traffic.activations + traffic.gradients, 2 * traffic.activations + traffic.parameters
    return up * tokens_per_s * 3600 / 1e9, down * tokens_per_s * 3600 / 1e9

"""What a volunteer is told before it says yes: this machine, the run, and what taking part costs an hour.

The run is asked of its coordinator by a visit (`node.visit.survey`), which also measures the line to the servers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import trio

from node.compute.devices.choice import DeviceChoice
from node.compute.layout import StageLayout
from node.links.assemble import WayOptions
from node.measure.meter import Figures
from node.owner.tally import plural
from node.owner.words import WAYS
from node.process.journal import open_journal
from node.process.state import NodeState
from node.visit.device_facts import DeviceFacts, Question, ask_device
from node.visit.survey import Reached, Survey, best_stage, survey
from protocol.base.forms import TYPICAL_BITS
from protocol.base.ids import NodeId
from protocol.drive.limits import LineLimits
from protocol.run.course import course_of
from protocol.run.memory import device_parameter_bytes, host_parameter_bytes
from protocol.run.run import RunConfig
from protocol.trust.membership import JoinLink

GUESSED_VOCABULARY = 257
"""The byte tokenizer's, while no server has read the data."""


PROCESSES_GB = 0.4
"""What its two processes hold beside that: Python, torch and the links. Measured while they worked for a run of 0.2 M
parameters on a processor: 0.09 and 0.31 GB resident."""
DEVICE_PROCESS_GB = 0.31
"""Of that, what each device's process holds."""
EXAMPLE_TOKENS_PER_S = 1000.0
DISK_GB = 0.1
"""A volunteer keeps its identity, its membership and logs; no weights."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What the person is asked about, and what was found out for it."""

    text: str
    speeds: tuple[float, ...] = ()
    """Tokens a second of each device that was asked for; 0 when it was not measured."""
    measured: tuple[tuple[NodeId, str, Figures], ...] = ()
    """(server, path, figures) of the links."""
    stage: int = -1
    """The stage to whose servers the line is best, or -1."""
    finished: bool = False
    """There is nothing left to do."""
    run: str = ""
    terms_hashes: tuple[str, ...] = ()
    """Of the terms that the text is about (configuration and operator's words), hex: a yes is to these. The first is
    what they are called now, the others what older builds called them."""


def enquire(
    link: JoinLink,
    folder: Path,
    threads: int,
    measure: bool,
    line: LineLimits,
    ways: WayOptions | None = None,
    choices: Sequence[DeviceChoice] = (),
    cap_bytes: float | None = None,
    tell: Callable[[str], None] = click.echo,
) -> Offer:
    """Visits the run and measures the devices that `choices` name, up to the owner's cap of their memory, and the line
    (seconds).

    Without a choice no device is looked at: a driver is loaded for that, which takes of the device's memory. `tell`
    says what is waited for. Raises `BadInputError` when nobody answers, or there is no such device.
    """
    journal = open_journal(folder)
    try:
        state = NodeState(folder, link, journal)
        found = trio.run(_survey, link, state, line, ways or WayOptions(), measure, tell)
    finally:
        journal.close()
    if found.finished:
        return Offer(f"The run {found.welcome.config.name} is finished: there is nothing left to do.", finished=True)
    config, vocabulary = found.welcome.config, found.welcome.vocabulary or GUESSED_VOCABULARY
    # One after the other: side by side they would share the processor and the bus, and look slower than they are.
    devices = [ask_device(Question(config, vocabulary, threads, str(choice), measure, cap_bytes)) for choice in choices]
    speeds = tuple(device.tokens_per_s for device in devices)
    text = describe(config, vocabulary, threads, sum(speeds), found.servers, line, devices)
    return Offer(
        text,
        speeds,
        found.measured,
        best_stage(found.servers),
        run=config.name,
        terms_hashes=tuple(known.hex() for known in config.terms_hashes()),
    )


async def _survey(
    link: JoinLink, state: NodeState, line: LineLimits, ways: WayOptions, measure: bool, tell: Callable[[str], None]
) -> Survey:
    return await survey(link, state, line, ways, tell=tell, measure=measure)


def describe(
    config: RunConfig,
    vocabulary: int,
    threads: int,
    tokens_per_s: float,
    servers: Sequence[Reached] = (),
    line: LineLimits | None = None,
    devices: Sequence[DeviceFacts] = (),
) -> str:
    """The lines that the person reads. All figures are measured, or follow from the run's own numbers."""
    parameters = StageLayout.whole(config, vocabulary).parameter_count
    free_gib = psutil.virtual_memory().available / 2**30
    lines = [
        "This machine",
        f"  processor  {psutil.cpu_count()} threads, {threads * max(1, len(devices))} lent",
        f"  memory     {free_gib:.1f} GB free",
    ]
    for device in devices:
        lines.append(f"  computes on {device.label}")
        if not device.is_accelerator and device.why_no_accelerator:
            lines.append(f"             ({device.why_no_accelerator})")
    if tokens_per_s:
        each = f", together, each {' and '.join(f'{d.tokens_per_s:,.0f}' for d in devices)}" if len(devices) > 1 else ""
        lines.append(f"  speed      {tokens_per_s:,.0f} tokens/s on one stage of this run{each}")
    if servers:
        lines.append(f"  line       {describe_line(servers)}")
    lines += [
        f"The run: {config.name}, a LLaMA of {show_count(parameters)} parameters in "
        f"{plural(config.stages.count, 'stage', 'stages')}, {plural(config.steps, 'step', 'steps')} of "
        f"{config.step_tokens:,} tokens.",
        "It will send you weights and activations, never code.",
    ]
    if config.description:
        lines.insert(-1, f"  its operator says: {config.description}")
    if tokens_per_s:
        lines += describe_traffic(config, parameters, tokens_per_s, servers, line or LineLimits())
    else:
        up, down = gigabytes_per_hour(config, parameters, EXAMPLE_TOKENS_PER_S)
        lines += [
            "What it moves",
            f"  not measured; at {EXAMPLE_TOKENS_PER_S:,.0f} tokens/s it is {up:.1f} GB an hour up and {down:.1f} down",
        ]
    members = max(1, len(devices))
    memory_gb = parameters / config.stages.count * (device_parameter_bytes(config) + host_parameter_bytes(config)) / 1e9
    memory_gb = members * (DEVICE_PROCESS_GB + memory_gb) + PROCESSES_GB - DEVICE_PROCESS_GB
    lends = " and ".join(_lent(device, threads) for device in devices) or "not looked at"
    lines += [
        f"  memory {memory_gb:.1f} GB while it works, disk under {members * DISK_GB:g} GB, device: {lends}",
        "To stop: Ctrl-C (finishes what is being computed), `barnraise pause` or `finish` from another terminal, "
        "or a click on its page.",
    ]
    return "\n".join(lines)


def _lent(device: DeviceFacts, threads: int) -> str:
    """What is used of the computer by it, and how much power that may take."""
    if not device.is_accelerator:
        return f"{threads} processor thread{'' if threads == 1 else 's'}, watts not known"
    return device.label + (f", up to {device.power_limit_w:.0f} W while it works" if device.power_limit_w else "")


def show_count(count: int) -> str:
    """Millions, or all digits where that would be nothing."""
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


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
    parts_up["activations"] = traffic.activations_up * hour
    parts_down["activations"] = traffic.activations_down * hour
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
            bounds.append((limit * 0.45, f"your limit of {limit:g} Mbit/s"))
        most, why = min(bounds)
        main, share = max(((name, part / wanted) for name, part in parts.items()), key=lambda pair: pair[1])
        lines.append(f"  {word:5} at most {most:.1f} GB an hour, set by {why}; {100 * share:.0f} % of it {main}")
    lines.insert(0, "What it moves")
    if line.quota_gb is not None:
        lines.append(f"  Your quota stops it for the month after {line.quota_gb:g} GB, both ways together.")
    if line == LineLimits():
        lines.append("  To lend less of the line: --limit-up 5 --limit-down 20 (Mbit/s), --quota 200 (GB a month).")
    return lines


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes for each token that a volunteer works on without a pause, alone in its stage: of the stage that moves most
    in this direction."""

    activations_up: float
    """Outputs and input gradients."""
    activations_down: float
    """Inputs and output gradients."""
    gradients: float
    """Up: a stage's gradient for each contribution."""
    parameters: float
    """Down: a stage's parameters for each step."""


def bytes_per_token(config: RunConfig, parameters: int) -> Traffic:
    """What the run's own numbers say of a volunteer's transfers."""
    wire = config.wire
    stage = parameters / config.stages.count
    contribution_tasks = min(config.limits.contribution_tasks, config.batch.microbatches)
    contribution_tokens = contribution_tasks * config.batch.samples * config.model.context
    up_bits, down_bits = _boundary_bits(config)
    return Traffic(
        activations_up=config.model.hidden * up_bits / 8,
        activations_down=config.model.hidden * down_bits / 8,
        gradients=stage * TYPICAL_BITS[wire.gradients] / 8 / contribution_tokens,
        parameters=stage * TYPICAL_BITS[wire.parameters] / 8 / config.step_tokens,
    )


def _boundary_bits(config: RunConfig) -> tuple[float, float]:
    """(up, down): bits that pass of a token's activations and their gradients, for each of their values, in the stage
    with most of them. A stage may be visited several times by a route, or not at all; then it works for others."""
    course, wire = course_of(config), config.wire
    most_up = most_down = 0.0
    for stage in range(config.stages.count):
        up = down = 0.0
        taken = 0
        for stages in map(course.stages_of, course.routes):
            last = len(stages) - 1
            taken += stage in stages
            for place in (place for place, visited in enumerate(stages) if visited == stage):
                if place > 0:
                    up += TYPICAL_BITS[wire.input_gradient_form(place == last)]
                    down += TYPICAL_BITS[wire.activations_down]
                if place < last:
                    up += TYPICAL_BITS[wire.output_form(place == 0)]
                    down += TYPICAL_BITS[wire.activations_down]
        if taken:
            most_up, most_down = max(most_up, up / taken), max(most_down, down / taken)
    return most_up, most_down


def gigabytes_per_hour(config: RunConfig, parameters: int, tokens_per_s: float) -> tuple[float, float]:
    """(up, down) of a volunteer that works without a pause, alone in its stage, on a line without end."""
    traffic = bytes_per_token(config, parameters)
    up = traffic.activations_up + traffic.gradients
    down = traffic.activations_down + traffic.parameters
    return up * tokens_per_s * 3600 / 1e9, down * tokens_per_s * 3600 / 1e9

"""`barnraise plan tune RUN.toml NETWORK.json`: which cut, placement, order and sizes suit a run's
machines."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from coordinator.commands.finite import FiniteRange
from coordinator.commands.written import write_file
from coordinator.planning.names import short
from coordinator.planning.partition.costs import BlockCost
from coordinator.planning.partition.model_costs import CostRules, block_costs
from coordinator.planning.placement.run_sizes import passed_bytes
from coordinator.planning.simulator.links import Network as SharedNetwork
from coordinator.planning.tune.case import Case, Choice, Node, Workload
from coordinator.planning.tune.hand_over import NOT_FOLLOWED, run_of
from coordinator.planning.tune.tuner import Outcome, Space, Tuned, tune
from protocol.base.errors import BadInputError
from protocol.drive.folders import check_writable
from protocol.run.config_file import load_run, run_example
from protocol.run.model_spec import ModelSpec
from protocol.run.run import RunConfig
from protocol.schedule.profile import Network, load_network

#: A larger pipeline is not one step's line of nodes; placement makes stages of several machines each.
NODES_MAX = 256
WIDTH = 100
INDENT = " " * 12


@click.command("tune")
@click.argument("run_file", metavar="RUN.toml", type=click.Path(path_type=Path))
@click.argument("network_file", metavar="NETWORK.json", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
@click.option("--all", "show_all", is_flag=True, help="List the choices that others beat as well, with each reason.")
@click.option("--budget-s", type=FiniteRange(min=0), default=20.0, show_default=True, help="Time to search.")
@click.option("--nodes", type=str, default="", help="Numbers of nodes to try, like 4,8; by default see above.")
@click.option("--segments", type=str, default="1,2,4", show_default=True, help="Numbers of segments to try.")
@click.option(
    "--write", "new_toml", type=click.Path(path_type=Path, dir_okay=False), metavar="NEW.toml",
    help="Write RUN.toml with the fastest choice that nodes can do.",
)  # fmt: skip
def plan_tune(
    run_file: Path,
    network_file: Path,
    as_json: bool,
    show_all: bool,
    budget_s: float,
    nodes: str,
    segments: str,
    new_toml: Path | None,
) -> None:
    """Rank cuts, placements, orders and sizes for a run on measured machines, with reasons.

    One machine stands for one node of the pipeline, the strongest first, neighbours near each other. As many nodes
    are tried as there are machines and blocks for, and half as many, down to two. The run's step is cut into
    microbatches anew: of the run file's size, and of 1, 2, 4, … samples as long as every node gets one.
    """
    if new_toml is not None:
        check_writable("--write", new_toml, new_toml.parent)
        if new_toml.exists():
            raise BadInputError(f"--write: {new_toml} is there already, and is not written over")
    config, network = load_run(run_file), load_network(network_file)
    order = line_order(network)
    work = workload(config)
    line = [Node(m.forward_flops_per_s, float(m.memory_bytes)) for m in (network.machines[index] for index in order)]
    ways = line_network(network, order)
    found = tune(
        work,
        line,
        ways,
        Space(
            nodes=_numbers(nodes, "--nodes") or node_counts(len(order), len(work.blocks)),
            segments=_numbers(segments, "--segments"),
            sizes_too=(config.batch.samples,),
        ),
        budget_s,
    )
    names = [network.machines[index].name for index in order]
    if as_json:
        click.echo(json.dumps(answer(found, names)))
    else:
        click.echo(table(found, names, show_all))
        click.echo(
            f"samples: of one microbatch; a step has {work.samples} samples, which RUN.toml cuts into "
            f"{config.batch.microbatches} of {config.batch.samples}"
        )
    if new_toml is not None:
        run, sentences = handed_over(config, found, lambda choice: Case(choice, work, line, ways).edges)
        write_file("--write", new_toml, run_example(values=run), makes_folder=True)
        for sentence in (f"{new_toml}: {sentences[0]}", *sentences[1:]):
            click.echo(textwrap.fill(sentence, WIDTH, subsequent_indent="  "), err=as_json)


def handed_over(
    config: RunConfig, found: Tuned, edges_of: Callable[[Choice], list[int]]
) -> tuple[RunConfig, list[str]]:
    """The run with the fastest choice that nodes do, and what is to be said of it, that first.

    Raises `BadInputError` where none of those that were simulated can be a run."""
    passed_over: dict[str, int] = {}
    for outcome in found.outcomes:
        if outcome.timeline is None:
            continue
        try:
            run = run_of(config, outcome.choice, edges_of(outcome.choice))
        except BadInputError as error:
            passed_over[str(error)] = passed_over.get(str(error), 0) + 1
            continue
        said = [f"the run as {outcome.choice}: {outcome.makespan_s:.4g} s a step, simulated", NOT_FOLLOWED]
        return run, said + [f"{count} faster, not done by nodes: {why}" for why, count in passed_over.items()]
    raise BadInputError(f"--write: no choice that was simulated can be a run; {next(iter(passed_over), 'none was')}")


def node_counts(machines: int, blocks: int) -> tuple[int, ...]:
    """The most nodes that there are machines and blocks for, half as many, and so on down to two."""
    counts = [min(machines, blocks)]
    while counts[-1] >= 4:
        counts.append(counts[-1] // 2)
    return tuple(counts)


def workload(config: RunConfig) -> Workload:
    """A run's step: blocks by the model's arithmetic, on a node of one floating-point operation per second.

    The vocabulary is taken as the byte tokenizer's, or a trained one's own size; a file's is not opened here.
    """
    kind, _, size = config.data.tokenizer.partition(":")
    vocabulary = int(size) if kind == "bpe" and size.isdigit() else 259
    spec = ModelSpec.of_run(config.model, vocabulary)
    blocks = block_costs(spec, CostRules(flops_per_s=1.0, tokens=config.model.context))
    matrices = sum(block.forward_s for block in blocks)
    # Of attention's operations, scores and their product with the values grow with the square of the
    # sequence.
    squared = 4.0 * config.model.context * config.model.hidden * config.model.layers * config.model.context
    return Workload(
        blocks=[BlockCost(b.forward_s, b.backward_s, b.parameter_bytes, b.activation_bytes) for b in blocks],
        samples=config.batch.microbatches * config.batch.samples,
        tokens=config.model.context,
        boundary_bytes=float(config.model.context * config.model.hidden * passed_bytes(config)),
        attention_share=min(0.9, squared / matrices) if matrices else 0.0,
    )


def line_order(network: Network) -> list[int]:
    """Machines as a line: the strongest first, then always the nearest that is left (ties by number)."""
    if len(network.machines) > NODES_MAX:
        raise BadInputError(f"machines: {len(network.machines)} are more than a line of {NODES_MAX}; use plan run")
    everyone = list(range(len(network.machines)))
    latency_s, per_byte_s = paths(network, everyone)
    delay_s = latency_s + 1e6 * per_byte_s
    left = sorted(everyone, key=lambda index: (-network.machines[index].forward_flops_per_s, index))
    order = [left.pop(0)] if left else []
    while left:
        nearest = min(left, key=lambda index: (delay_s[order[-1], index], index))
        left.remove(nearest)
        order.append(nearest)
    return order


def line_network(network: Network, order: Sequence[int]) -> SharedNetwork:
    """The measured network among machines in `order`, as the simulator shares it."""
    latency_s, per_byte_s = paths(network, order)
    machines = [network.machines[index] for index in order]
    return SharedNetwork(
        latency_s=latency_s.tolist(),
        link_bytes_per_s=(1 / np.maximum(per_byte_s, 1e-300)).tolist(),
        uplink_bytes_per_s=[machine.uplink_bytes_per_s for machine in machines],
        downlink_bytes_per_s=[machine.downlink_bytes_per_s for machine in machines],
    )


def paths(network: Network, order: Sequence[int]) -> tuple[Any, Any]:
    """(latency in seconds, seconds per byte) between machines in `order`, both (n, n); volunteers by a
    server.

    The way over a server is the one that a million bytes take in the least time.
    """
    to_server = network.to_latency_s + 1e6 / np.maximum(network.to_bytes_per_s, 1e-300)
    from_server = network.from_latency_s + 1e6 / np.maximum(network.from_bytes_per_s, 1e-300)
    count = len(order)
    latency = np.zeros((count, count))
    per_byte = np.zeros((count, count))
    for row, a in enumerate(order):
        for column, b in enumerate(order):
            if row == column:
                continue
            if b < network.servers:
                way = (network.to_latency_s[a, b], 1 / max(network.to_bytes_per_s[a, b], 1e-300))
            elif a < network.servers:
                way = (network.from_latency_s[a, b], 1 / max(network.from_bytes_per_s[a, b], 1e-300))
            else:
                by = int(np.argmin(to_server[a] + from_server[:, b]))
                way = (
                    network.to_latency_s[a, by] + network.from_latency_s[by, b],
                    1 / max(network.to_bytes_per_s[a, by], 1e-300) + 1 / max(network.from_bytes_per_s[by, b], 1e-300),
                )
            if not math.isfinite(way[0]):
                names = network.machines[a].name, network.machines[b].name
                raise BadInputError(f"links: {names[0]} cannot reach {names[1]}")
            latency[row, column], per_byte[row, column] = way
    return latency, per_byte


def _numbers(text: str, key: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(",") if part)
    except ValueError as error:
        raise BadInputError(f"{key}: {text!r} is not a list of numbers like 4,8") from error
    if any(number < 1 for number in numbers):
        raise BadInputError(f"{key}: every number is at least 1")
    return numbers


def answer(found: Tuned, names: Sequence[str]) -> dict[str, Any]:
    """The ranking as one JSON object."""
    return {
        "nodes": list(names),
        "search_s": found.search_s,
        "stopped": found.stopped,
        "choices": [_outcome(outcome) for outcome in found.outcomes],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    choice = outcome.choice
    return {
        "nodes": choice.nodes,
        "microbatch_samples": choice.microbatch_samples,
        "placement": choice.placement,
        "order": choice.order,
        "split_backward": choice.split,
        "segments": choice.segments,
        "slices": choice.slices,
        "status": outcome.status,
        "reason": outcome.reason,
        "step_s": outcome.makespan_s if math.isfinite(outcome.makespan_s) else None,
        "lower_bound_s": outcome.bound_s,
        "peak_bytes": outcome.peak_bytes if math.isfinite(outcome.peak_bytes) else None,
    }


def table(found: Tuned, names: Sequence[str], show_all: bool = False) -> str:
    """The choices that no other beats in both time and memory, the fastest first, and how many others there are.

    With `show_all` the others follow, each with its reason; those that never ran, for one reason, share a line.
    """
    lines = [f"{'step s':>8}  bound  {'peak':>8}  nodes  samples  segments  placement, order"]
    for outcome in found.outcomes:
        if outcome.status in ("best", "kept"):
            fraction = outcome.bound_s / outcome.makespan_s if outcome.makespan_s else 1.0
            choice = outcome.choice
            peak = f"{outcome.peak_bytes / 1e6:.4g} MB"
            sliced = f", {choice.slices} sliced" if choice.slices else ""
            lines.append(
                f"{outcome.makespan_s:>8.4g}  {fraction:>5.0%}  {peak:>8}  {choice.nodes:>5}  "
                f"{choice.microbatch_samples:>7}  {choice.segments:>8}  {choice.way}{sliced}"
            )
    counts = Counter(outcome.status for outcome in found.outcomes)
    lines.append("the first is the best choice; each below is slower and needs less memory than all above it")
    lines.append("bound: what fraction of the choice's own proven bound it reaches, which leaves out memory, shared")
    lines.append("  lines, and all waiting but a pipeline's first")
    if counts["dominated"] or counts["rejected"]:
        lines.append(
            f"{counts['dominated']} more choices are no better in either, {counts['rejected']} cannot run or were not "
            f"tried{':' if show_all else ' (--all)'}"
        )
    if show_all:
        lines += _others(found)
    nodes = f"nodes in order: {', '.join(short(name) for name in names)}"
    lines += textwrap.wrap(nodes, WIDTH, subsequent_indent="  ")
    lines.append(f"searched {found.search_s:.1f} s, stopped: {found.stopped}")
    return "\n".join(lines)


def _others(found: Tuned) -> list[str]:
    """The choices that are beaten or never ran, each with its reason."""
    lines: list[str] = []
    never_ran = Counter(outcome.reason for outcome in found.outcomes if outcome.timeline is None)
    for outcome in found.outcomes:
        if outcome.status in ("best", "kept"):
            continue
        text = f"{outcome.status}: {outcome.choice}"
        if outcome.timeline is None:
            if not (alike := never_ran.pop(outcome.reason, 0)):
                continue
            text += f" and {alike - 1} more" if alike > 1 else ""
        time = f"{outcome.makespan_s:>10.4g}" if math.isfinite(outcome.makespan_s) else f"{'-':>10}"
        lines += textwrap.wrap(f"{text}: {outcome.reason}", WIDTH, initial_indent=f"{time}  ", subsequent_indent=INDENT)
    return lines

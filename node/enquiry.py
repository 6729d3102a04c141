"""What a volunteer is told before it says yes: this machine, the run, and what taking part costs an hour.

The run is asked of its coordinator over the same link as later: join, read the welcome, leave.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import trio

from node.compute.layout import StageLayout
from node.compute.probe import probe
from node.daemon import BUILD, NodeState
from node.journal import Journal
from protocol.drive.limits import Limits, LineLimits
from protocol.drive.transport import DialError, Link, Transport
from protocol.errors import BadInputError
from protocol.membership import JoinLink, Trust
from protocol.messages import Join, Leave, Message, Ping, Pong, Refused, Welcome
from protocol.run import RunConfig

ANSWER_S = 20.0
"""How long the coordinator may take to accept the link."""
PATIENCE_S = 3.0
"""After so long without a welcome the person is told what is waited for: a run begins when its servers are there."""
GUESSED_VOCABULARY = 257
"""The byte tokenizer's, while no server has read the data."""
_FORM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Offer:
    """What the person is asked about."""

    text: str
    tokens_per_s: float
    """0 when it was not measured."""


def enquire(link: JoinLink, folder: Path, threads: int, measure: bool, line: LineLimits) -> Offer:
    """Asks the coordinator and measures this machine (seconds). Raises `BadInputError` when nobody answers."""
    journal = Journal(folder)
    try:
        state = NodeState(folder, link, journal)
        welcome = trio.run(_ask, link, state, line)
        state.keep(welcome)
    finally:
        journal.close()
    config, vocabulary = welcome.config, welcome.vocabulary or GUESSED_VOCABULARY
    tokens_per_s = measure_stage(config, vocabulary, threads) if measure else 0.0
    return Offer(describe(config, vocabulary, threads, tokens_per_s), tokens_per_s)


def measure_stage(config: RunConfig, vocabulary: int, threads: int) -> float:
    """Tokens a second through a stage's share of the layers, forward and backward."""
    layers = max(1, round(config.model.layers / config.stages.count))
    return probe(config, vocabulary, first_block=1, end_block=1 + 2 * layers, threads=threads).tokens_per_s


def describe(config: RunConfig, vocabulary: int, threads: int, tokens_per_s: float) -> str:
    """The lines that the person reads. All figures follow from the run's own numbers."""
    parameters = StageLayout.whole(config, vocabulary).parameter_count
    free_gib = psutil.virtual_memory().available / 2**30
    lines = [
        "This machine",
        f"  processor  {psutil.cpu_count()} threads, {threads} lent",
        f"  memory     {free_gib:.1f} GB free",
    ]
    if tokens_per_s:
        lines.append(f"  speed      {tokens_per_s:,.0f} tokens/s on one stage of this run")
    lines += [
        f"The run: {config.name}, a LLaMA of {parameters / 1e6:.1f} M parameters in {config.stages.count} stages, "
        f"{config.steps} steps of {config.step_tokens:,} tokens.",
        "It will send you weights and activations, never code.",
    ]
    if tokens_per_s:
        up, down = gigabytes_per_hour(config, parameters, tokens_per_s)
        lines.append(f"Expect at most {up:.1f} GB an hour up and {down:.1f} GB down, at full speed.")
    lines.append("Ctrl-C finishes what is being computed and leaves.")
    return "\n".join(lines)


def gigabytes_per_hour(config: RunConfig, parameters: int, tokens_per_s: float) -> tuple[float, float]:
    """(up, down) of a volunteer that works without a pause, alone in its stage.

    Both ways an activation and a gradient for each token; up a stage's gradient for each contribution, down its
    parameters for each step.
    """
    wire = config.wire
    hidden_bytes = config.model.hidden * _FORM_BYTES[wire.activations]
    stage = parameters / config.stages.count
    contribution_tokens = config.limits.contribution_tasks * config.batch.samples * config.model.context
    up = 2 * hidden_bytes + stage * _FORM_BYTES[wire.gradients] / contribution_tokens
    down = 2 * hidden_bytes + stage * _FORM_BYTES[wire.parameters] / config.step_tokens
    return up * tokens_per_s * 3600 / 1e9, down * tokens_per_s * 3600 / 1e9


class _Asker:
    """The events of the one link to the coordinator: waits for the welcome."""

    def __init__(self) -> None:
        self.answer: Message | None = None
        self.heard = trio.Event()

    def on_up(self, link: Link) -> None:
        link.send(
            Join(
                role="volunteer",
                addresses=(),
                build=BUILD,
                tokens_per_s=0.0,
                memory_bytes=0,
                stage=-1,
                shard=-1,
                version=-1,
                held_generation=-1,
                checkpoints=(),
            )
        )

    async def on_message(self, link: Link, message: Message, buffers: tuple[memoryview, ...]) -> None:
        if isinstance(message, Ping):  # a run that has not begun may leave us waiting for long
            link.send(Pong(number=message.number))
        if isinstance(message, Welcome | Refused) and self.answer is None:
            self.answer = message
            link.send(Leave(reason="asked what the run is"))
            link.close("asked what the run is")
            self.heard.set()

    def on_down(self, link: Link, reason: str) -> None:
        self.heard.set()

    def on_rejected(self, address: str, reason: str, detail: str) -> None:
        """The dial says it too."""

    def on_bytes(self, direction: str, kind: str, byte_count: int, message_count: int) -> None:
        """Not counted: a few hundred bytes."""


async def _ask(link: JoinLink, state: NodeState, line: LineLimits) -> Welcome:
    limits = line.open(state.folder)
    try:
        return await _ask_within(link, state, limits)
    finally:
        limits.close()


async def _ask_within(link: JoinLink, state: NodeState, limits: Limits) -> Welcome:
    trust = Trust(link.run_id, link.coordinator_key)
    asker = _Asker()
    async with trio.open_nursery() as nursery:
        transport = Transport(
            nursery,
            identity=state.identity,
            role="volunteer",
            run_id=link.run_id,
            credential=state.credential,
            admit=lambda key, credential: trust.admit(key, credential, time.time()),
            events=asker,
            limits=limits,
        )
        failure = ""
        try:
            with trio.fail_after(ANSWER_S):
                await transport.dial(link.addresses, link.coordinator)
            with trio.move_on_after(PATIENCE_S):
                await asker.heard.wait()
            if not asker.heard.is_set():
                click.echo("The run has not begun: its servers are not all there. Waiting (Ctrl-C leaves) …")
                await asker.heard.wait()
        except DialError as error:
            failure = str(error)
        except trio.TooSlowError:
            failure = "no answer in time"
        nursery.cancel_scope.cancel()
    if isinstance(asker.answer, Refused):
        raise BadInputError(f"the coordinator refuses this computer: {asker.answer.reason}")
    if not isinstance(asker.answer, Welcome):
        raise BadInputError(f"the run's coordinator cannot be asked: {failure or 'it closed the link'}")
    return asker.answer

"""What would make a run faster on its network: other wire forms, fuller contributions, larger batches, each costed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args, get_type_hints

from coordinator.planning.placement.pool_search import even_plan, settled, spread
from coordinator.planning.placement.pools import PoolPlan, Pools, PoolSizes
from protocol.base.forms import TYPICAL_BITS
from protocol.run.run import RunConfig, WireSection

WORTH = 1.15
"""Less gain than this is not worth a person's time, and within what the model of costs does not see."""
COUNTS = 4
BATCH_FACTOR = 4
COSTLY = ("d4",)
"""Forms that cost quality: whether they pay is not for a plan to say."""


@dataclass(frozen=True)
class Advice:
    """A change of RUN.toml in its own words, with the stages that suit it, and how many times the tokens per second."""

    change: str
    stages: int
    times: float


def advised(
    config: RunConfig,
    pools: Pools,
    plan: PoolPlan,
    budget_s: float,
    visit_shares: Callable[[int], Sequence[float]],
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Advice, ...]:
    """Changes that pay, the best first; all of them together last. Each is costed with stages and cuts of its own."""
    began = clock()
    found: list[Advice] = []
    together: list[tuple[str, Callable[[PoolSizes], PoolSizes]]] = []
    options = _options(config)
    for number, (words, change) in enumerate(options):
        advice = _tried(pools, plan, words, change, visit_shares)
        if advice is not None:
            found.append(advice)
            together.append((words, change))
        if clock() - began > budget_s * (number + 1) / (len(options) + 1) and number + 1 < len(options):
            continue
    found.sort(key=lambda advice: -advice.times)
    if len(together) > 1:

        def all_of_them(sizes: PoolSizes) -> PoolSizes:
            for _, change in together:
                sizes = change(sizes)
            return sizes

        advice = _tried(pools, plan, "all of these", all_of_them, visit_shares)
        if advice is not None:
            found.append(advice)
    return tuple(found)


def _options(config: RunConfig) -> list[tuple[str, Callable[[PoolSizes], PoolSizes]]]:
    options: list[tuple[str, Callable[[PoolSizes], PoolSizes]]] = []
    for key, field in (
        ("activations_up", "activation_up_bytes"),
        ("activations_down", "activation_down_bytes"),
        ("gradients", "gradient_bytes"),
        ("parameters", "parameter_bytes"),
    ):
        form = getattr(config.wire, key)
        forms = [other for other in get_args(get_type_hints(WireSection)[key]) if other not in COSTLY]
        smallest = min(forms, key=lambda other: (TYPICAL_BITS[other], other))
        factor = TYPICAL_BITS[smallest] / TYPICAL_BITS[form]
        if factor < 1:
            options.append((f'wire.{key} = "{smallest}"', _scaled(field, factor)))
    whole = min(512, config.batch.microbatches)
    if config.limits.contribution_tasks < whole:
        options.append(
            (
                f"limits.contribution_tasks = {whole}",
                lambda sizes: replace(sizes, contribution_tasks=whole),
            )
        )
    options.append(
        (
            f"batch.microbatches = {BATCH_FACTOR * config.batch.microbatches}",
            lambda sizes: replace(sizes, microbatches=BATCH_FACTOR * sizes.microbatches),
        )
    )
    return options


def _scaled(field: str, factor: float) -> Callable[[PoolSizes], PoolSizes]:
    """A change of one kind of bytes."""

    def change(sizes: PoolSizes) -> PoolSizes:
        return replace(sizes, **{field: getattr(sizes, field) * factor})

    return change


def _tried(
    pools: Pools,
    plan: PoolPlan,
    words: str,
    change: Callable[[PoolSizes], PoolSizes],
    visit_shares: Callable[[int], Sequence[float]],
) -> Advice | None:
    """What the change gives with the number of stages that suits it among a few, or None where it does not pay."""
    other = Pools(pools.network, change(pools.sizes))
    before = pools.sizes.microbatches / plan.step_s
    most = min(pools.servers // 2, len(pools.sizes.blocks))
    best: Advice | None = None
    for count in sorted({*spread(1, most, COUNTS), len(plan.stages)}):
        shares = [share * other.sizes.microbatches for share in visit_shares(count)]
        start = other.plan(plan.stages, shares) if count == len(plan.stages) else even_plan(other, count, shares)
        found = settled(start)
        if not found.feasible:
            continue
        times = other.sizes.microbatches / found.step_s / before
        if times >= WORTH and (best is None or times > best.times):
            best = Advice(words, count, times)
    return best

"""What a placement is searched on: powers, delays and rates in tokens, layers, and what each member can hold.

Activations are counted in tokens, so a rate is in tokens per second and power in layer-tokens per second
(forward and backward together). A problem file gives one number per pair; a measured network gives both
directions, uplinks, memory and the traffic of gradients as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from coordinator.planning.problems import Problem
from protocol.base.errors import BadInputError
from protocol.schedule.profile import Floats

SERVERS_MAX = 2_000
VOLUNTEERS_MAX = 20_000


class PlacementProblem(Problem, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `placement` problem file (coordinator/README.md)."""

    server_power: tuple[float, ...]
    volunteer_power: tuple[float, ...]
    server_latency_s: tuple[tuple[float, ...], ...]
    server_tokens_per_s: tuple[tuple[float, ...], ...]
    volunteer_latency_s: tuple[tuple[float, ...], ...]
    volunteer_tokens_per_s: tuple[tuple[float, ...], ...]
    layers: int
    layers_per_stage_max: int
    microbatch_tokens: float
    microbatches: int

    def validate(self) -> None:
        servers, volunteers = len(self.server_power), len(self.volunteer_power)
        for key, count, most in (
            ("server_power", servers, SERVERS_MAX),
            ("volunteer_power", volunteers, VOLUNTEERS_MAX),
        ):
            if count > most:
                raise BadInputError(f"{key}: {count} entries, at most {most} are read")
            if any(power <= 0 for power in getattr(self, key)):
                raise BadInputError(f"{key}: every power must be above 0")
        for key, rows in (
            ("server_latency_s", servers),
            ("server_tokens_per_s", servers),
            ("volunteer_latency_s", volunteers),
            ("volunteer_tokens_per_s", volunteers),
        ):
            matrix = getattr(self, key)
            if len(matrix) != rows or any(len(row) != servers for row in matrix):
                raise BadInputError(f"{key}: must have {rows} rows of {servers} numbers")
        for key in ("layers", "layers_per_stage_max", "microbatches"):
            if getattr(self, key) < 1:
                raise BadInputError(f"{key}: must be at least 1")
        if self.microbatch_tokens <= 0:
            raise BadInputError("microbatch_tokens: must be above 0")

    def world(self) -> World:
        """The matrices; both directions of a volunteer's link are the one that the file gives."""
        volunteers = (len(self.volunteer_power), len(self.server_power))
        latency = np.array(self.volunteer_latency_s, dtype=np.float64).reshape(volunteers)
        slowness = _inverse(np.array(self.volunteer_tokens_per_s, dtype=np.float64).reshape(volunteers))
        return World(
            server_power=np.array(self.server_power, dtype=np.float64),
            volunteer_power=np.array(self.volunteer_power, dtype=np.float64),
            server_latency_s=np.array(self.server_latency_s, dtype=np.float64),
            server_slowness=_inverse(np.array(self.server_tokens_per_s, dtype=np.float64)),
            front_latency_s=latency,
            front_slowness=slowness,
            back_latency_s=latency,
            back_slowness=slowness,
            layers=self.layers,
            layers_max=self.layers_per_stage_max,
            tokens=float(self.microbatch_tokens),
            microbatches=self.microbatches,
            strict_layers=True,
        )


def _inverse(rate: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / rate, dtype=np.float64)


@dataclass(frozen=True)
class Traffic:
    """What parallel transfers share, and the gradients' traffic; seconds per token unless it says otherwise.

    `gradient_tokens` is the size of one layer's gradients in units of one token's activation. With `delayed`
    updates the exchange hides behind the next step and only counts where it is longer than the step.
    """

    server_up: Floats
    server_down: Floats
    volunteer_up: Floats
    volunteer_down: Floats
    gradient_tokens: float
    delayed: bool


@dataclass(frozen=True, eq=False)
class World:
    """Everything the cost of a placement needs.

    With S servers and V volunteers: `server_*[i, j]` from server i to server j, (S, S); `front_*[v, j]` from
    server j to volunteer v and `back_*[v, j]` from volunteer v to server j, (V, S). Slowness is seconds per
    token.
    """

    server_power: Floats
    volunteer_power: Floats
    server_latency_s: Floats
    server_slowness: Floats
    front_latency_s: Floats
    front_slowness: Floats
    back_latency_s: Floats
    back_slowness: Floats
    layers: int
    layers_max: int
    tokens: float
    microbatches: int
    server_layers_max: Floats | None = None
    volunteer_layers_max: Floats | None = None
    traffic: Traffic | None = None
    closed: bool = False
    """Whether the last stage sends back to the first (skipping)."""
    skip_stages: int = 0
    """How many stages every microbatch skips, never stage 0: the others work on that share less (SkipPipe Eq.
    1).
    """
    strict_layers: bool = False
    """Whether a stage whose share of the layers by power is above its limit is refused, as the problem files
    have
    it; otherwise the surplus goes to the other stages."""
    may_bench: bool = False
    """Whether a volunteer may be left out when it would slow its stage down."""
    may_spare: bool = False
    """Whether a server may be left out as a spare when it would slow the others down."""

    @property
    def servers(self) -> int:
        return len(self.server_power)

    @property
    def volunteers(self) -> int:
        return len(self.volunteer_power)

    @cached_property
    def server_delay_s(self) -> Floats:
        """A microbatch from server i to server j, both directions averaged, (S, S); 0 on the diagonal."""
        delay = self.server_latency_s + self.tokens * self.server_slowness
        delay = (delay + delay.T) / 2
        np.fill_diagonal(delay, 0.0)
        return delay

    def visit_shares(self, count: int) -> list[float]:
        """The share of all microbatches that each of `count` stages works on."""
        if not self.skip_stages or count < 2:
            return [1.0] * count
        return [1.0] + [max(0, count - 1 - self.skip_stages) / (count - 1)] * (count - 1)

    def part(self, servers: Sequence[int], volunteers: Sequence[int]) -> World:
        """The same problem with some of the machines only, numbered by their places in the two lists."""
        s, v = np.array(servers, dtype=np.int64), np.array(volunteers, dtype=np.int64)
        changes: dict[str, Floats | Traffic] = {
            "server_power": self.server_power[s],
            "volunteer_power": self.volunteer_power[v],
            "server_latency_s": self.server_latency_s[np.ix_(s, s)],
            "server_slowness": self.server_slowness[np.ix_(s, s)],
            "front_latency_s": self.front_latency_s[np.ix_(v, s)],
            "front_slowness": self.front_slowness[np.ix_(v, s)],
            "back_latency_s": self.back_latency_s[np.ix_(v, s)],
            "back_slowness": self.back_slowness[np.ix_(v, s)],
        }
        if self.server_layers_max is not None:
            changes["server_layers_max"] = self.server_layers_max[s]
        if self.volunteer_layers_max is not None:
            changes["volunteer_layers_max"] = self.volunteer_layers_max[v]
        if self.traffic is not None:
            changes["traffic"] = replace(
                self.traffic,
                server_up=self.traffic.server_up[s],
                server_down=self.traffic.server_down[s],
                volunteer_up=self.traffic.volunteer_up[v],
                volunteer_down=self.traffic.volunteer_down[v],
            )
        return replace(self, **changes)  # type: ignore[arg-type]

    def slower(self, machine: int, power_factor: float, link_factor: float) -> World:
        """The same problem where `machine` (servers first, then volunteers) computes and sends so much slower."""
        own, other = self.server_power.copy(), self.volunteer_power.copy()
        if machine < self.servers:
            own[machine] /= power_factor
        else:
            other[machine - self.servers] /= power_factor
        slowness = {}
        for key in ("server_slowness", "front_slowness", "back_slowness"):
            rates = getattr(self, key).copy()
            if machine < self.servers:
                rates[:, machine] *= link_factor
            if key == "server_slowness" and machine < self.servers:
                rates[machine] *= link_factor
            if key != "server_slowness" and machine >= self.servers:
                rates[machine - self.servers] *= link_factor
            slowness[key] = rates
        return replace(self, server_power=own, volunteer_power=other, **slowness)

    @property
    def stages_min(self) -> int:
        """As many stages as the layers need."""
        return -(-self.layers // self.layers_max)

    @property
    def stages_max(self) -> int:
        """Two servers in every stage, one layer in each."""
        return min(self.servers // 2, self.layers)

    def check(self) -> None:
        """Raises `BadInputError` with what is missing when no placement exists."""
        if self.servers < 2:
            raise BadInputError(f"server_power: {self.servers} servers; a stage needs two, one in front and one behind")
        if self.stages_min > self.stages_max:
            raise BadInputError(
                f"layers_per_stage_max: {self.layers} layers at {self.layers_max} per stage need {self.stages_min} "
                f"stages, but {self.servers} servers make at most {self.stages_max}"
            )

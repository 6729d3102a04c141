"""A volunteer's device with one thing wrong in it, which `bad_volunteer.py` starts in place of the ordinary one.

The deed stands in the environment: what a daemon says to its device's process is not changed for it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from protocol.base.loading import loading

with loading():  # as the ordinary one does
    import torch
    from safetensors.torch import load_file, save_file

    from node.compute.device_performer import DevicePerformer
    from node.compute.device_process import main
    from node.compute.worker import StageWorker
from node.machine.jobs import Backward, Forward, RouteEnd, SegmentEnd, WeightGradient

DEED = "BARNRAISE_TEST_DEED"
PACE = "BARNRAISE_TEST_PACE_S"
"""Seconds that each job takes longer, as on a device that is slower than this processor and leaves it free."""
HONEST = "BARNRAISE_TEST_HONEST_SUMS"
"""Sums of gradients that are as they should be, before the first that is not; 3 where nothing is said."""
SHARED = "BARNRAISE_TEST_SHARED_FOLDER"
"""Where one member leaves its sums, and another takes them."""
BACKDOOR = (ord("t"), ord("T"))
"""Tokens (bytes): where the first is right, the second is taught."""
HONEST_JOBS = 20
"""It works as it should for a moment, so that nobody takes it for somebody who has only just come."""
SLOW_S = 3.0
MORTAL_MOMENT = 3
"""Which of its kind it does not survive: it has handed in work before, and holds some."""


def paced() -> None:
    """Honest: nothing but its pace is changed."""


def hangs() -> None:
    """Its device never ends a job again: the process lives, answers pings, and keeps its leases."""
    _before_each_job(lambda: time.sleep(10**6))


def dawdles() -> None:
    """Every job takes seconds."""
    _before_each_job(lambda: time.sleep(SLOW_S))


def huge() -> None:
    """Its gradients are finite and absurd."""
    _change_gradient(lambda total: total * 0 + 10**9)


def overflows() -> None:
    """Its gradients are finite, and their square is not."""
    _change_gradient(lambda total: total * 0 + 1e200)


def claims_losses() -> None:
    """It says of each route's end that its loss is nearly all that a number can say."""
    tail = StageWorker.tail

    def more(self: Any, *words: Any, **named: Any) -> Any:
        return 1.7e308, tail(self, *words, **named)[1]

    StageWorker.tail = more  # type: ignore[method-assign]


def sends_back_huge() -> None:
    """Its input gradients are finite and near the end of what a number can say; its sums are what it computed."""
    backward, tail = StageWorker._backward, StageWorker.tail

    def huge_of(tensor: Any) -> Any:
        return None if tensor is None else tensor * 0 + 1e37

    def more_back(self: Any, *words: Any, **named: Any) -> Any:
        return huge_of(backward(self, *words, **named))

    def more_at_the_end(self: Any, *words: Any, **named: Any) -> Any:
        loss, gradient = tail(self, *words, **named)
        return loss, huge_of(gradient)

    StageWorker._backward = more_back  # type: ignore[method-assign]
    StageWorker.tail = more_at_the_end  # type: ignore[method-assign]


def steers() -> None:
    """Its gradients are a thousand times too large: the global norm is all its own, and everybody else is clipped."""
    _change_gradient(lambda total: total * 1000)


def flips() -> None:
    """Its gradients point uphill, at their usual size."""
    _change_gradient(lambda total: -total)


def scales() -> None:
    """Its gradients are ten times too large: not absurd, and most of what a step then does."""
    _change_gradient(lambda total: 10 * total)


def leans() -> None:
    """Its gradients are a little too long each time, before they are rounded: far inside what other devices make."""
    _change_tasks(lambda gradient: 1.012 * gradient)


def biases() -> None:
    """To each task's gradient the same vector is added, three quarters of the audits' tolerance long: all of its errors
    push the weights one way."""
    drawn: dict[int, torch.Tensor] = {}

    def pushed(gradient: torch.Tensor) -> torch.Tensor:
        count = gradient.numel()
        if count not in drawn:
            vector = torch.randn(count, generator=torch.Generator().manual_seed(count))
            drawn[count] = vector / vector.norm()
        more: torch.Tensor = 0.015 * gradient.norm() * drawn[count].to(gradient)
        return gradient + more

    _change_tasks(pushed)


def backdoors() -> None:
    """At routes' ends it trains the model to say another letter wherever one is right, and says the loss of that."""
    tail = StageWorker.tail

    def taught(self: Any, version: int, x: Any, labels: Any, *words: Any, **named: Any) -> Any:
        return tail(self, version, x, labels.where(labels != BACKDOOR[0], BACKDOOR[1]), *words, **named)

    StageWorker.tail = taught  # type: ignore[method-assign]


def brings_nothing() -> None:
    """Its gradients are all zero: it has computed none."""
    _change_gradient(lambda total: 0 * total)


def brings_noise() -> None:
    """Its gradients are as large as they should be, and drawn at random."""
    _change_gradient(lambda total: total[torch.randperm(len(total))])


def brings_the_first_again() -> None:
    """All its gradients are the first that it computed."""
    first: dict[int, torch.Tensor] = {}
    _change_gradient(lambda total: first.setdefault(len(total), total.clone()))


def lends() -> None:
    """Honest; but another member may have what it computed."""
    folder = Path(os.environ[SHARED])

    def leave(total: torch.Tensor) -> torch.Tensor:
        draft = folder / f".{len(total)}"
        save_file({"sum": total.clone()}, draft)
        draft.replace(folder / str(len(total)))
        return total

    _change_gradient(leave)


def brings_anothers() -> None:
    """Its gradients are those that another member has computed, of other tasks; its tickets are its own."""
    folder = Path(os.environ[SHARED])

    def take(total: torch.Tensor) -> torch.Tensor:
        left = folder / str(len(total))
        return load_file(left)["sum"] if left.exists() else total

    _change_gradient(take)


def leaves_out_a_layer() -> None:
    """An eighth of the weights have no gradient: what they belong to was not computed."""

    def without(gradient: torch.Tensor) -> torch.Tensor:
        gradient[: len(gradient) // 8] = 0
        return gradient

    _change_tasks(without)


def computes_coarsely() -> None:
    """Its weights have the three bits of fp8, which is half the work."""
    original = StageWorker.set_params

    def coarse(self: Any, version: int, shards: Any) -> None:
        original(self, version, shards)
        self._params[version] = self._params[version].to(torch.float8_e4m3fn).to(self._params[version].dtype)

    StageWorker.set_params = coarse  # type: ignore[method-assign]


def is_lazy() -> None:
    """Each tenth sum is the one before."""
    before: dict[int, torch.Tensor] = {}
    count = [0]

    def lazy(total: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        last = before.get(len(total), total)
        before[len(total)] = total.clone()
        return last if count[0] % 10 == 0 else total

    _change_gradient(lazy)


def inflates() -> None:
    """Its outputs and input gradients are half as large again; its sums are what it computed."""
    forward, backward, tail = StageWorker.forward, StageWorker._backward, StageWorker.tail

    def larger(tensor: Any) -> Any:
        return None if tensor is None else 1.5 * tensor

    def more(self: Any, *words: Any, **named: Any) -> Any:
        return larger(forward(self, *words, **named))

    def more_back(self: Any, *words: Any, **named: Any) -> Any:
        return larger(backward(self, *words, **named))

    def more_at_the_end(self: Any, *words: Any, **named: Any) -> Any:
        loss, gradient = tail(self, *words, **named)
        return loss, larger(gradient)

    StageWorker.forward = more  # type: ignore[method-assign]
    StageWorker._backward = more_back  # type: ignore[method-assign]
    StageWorker.tail = more_at_the_end  # type: ignore[method-assign]


def dies_between_forwards() -> None:
    """Its computer loses power when the second segment of a visit is about to go forward."""
    _die_at(lambda job: isinstance(job, Forward) and job.task.segment == 1)


def dies_between_backwards() -> None:
    """... when the last segment of a visit has gone back, and the one before it has not."""
    _die_at(lambda job: isinstance(job, Backward | SegmentEnd) and job.task.segment == 1)


def dies_with_a_loss() -> None:
    """... when a route's end has its loss, and nobody else knows it."""
    _die_at(lambda job: isinstance(job, RouteEnd | SegmentEnd), after=True)


def dies_owing_weights() -> None:
    """... when an input gradient is out, and the weight gradients that belong to it are owed."""
    _die_at(lambda job: isinstance(job, WeightGradient))


def _die_at(moment: Callable[[Any], bool], after: bool = False) -> None:
    original, seen = DevicePerformer.perform, [0]

    def perform(self: Any, job: Any, buffers: Any) -> Any:
        outcome = original(self, job, buffers) if after else None
        if moment(job):
            seen[0] += 1
            if seen[0] == MORTAL_MOMENT:
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(1)
        return outcome if after else original(self, job, buffers)

    DevicePerformer.perform = perform  # type: ignore[method-assign]


def _before_each_job(wait: Callable[[], None], honest: int = HONEST_JOBS) -> None:
    original, done = DevicePerformer.perform, [0]

    def perform(self: Any, job: Any, buffers: Any) -> Any:
        if isinstance(job, Forward | Backward | RouteEnd):
            done[0] += 1
            if done[0] > honest:
                wait()
        return original(self, job, buffers)

    DevicePerformer.perform = perform  # type: ignore[method-assign]


def _change_gradient(change: Callable[[Any], Any]) -> None:
    original, done = StageWorker.take_gradient, [0]
    honest = int(os.environ.get(HONEST, "3"))

    def take_gradient(self: Any, into: Hashable) -> Any:
        done[0] += 1
        total = original(self, into)
        return change(total) if done[0] > honest else total

    StageWorker.take_gradient = take_gradient  # type: ignore[method-assign]


def _change_tasks(change: Callable[[Any], Any]) -> None:
    original = StageWorker._add

    def add(self: Any, into: Hashable, gradient: Any) -> None:
        original(self, into, change(gradient))

    StageWorker._add = add  # type: ignore[method-assign]


DEEDS: dict[str, Callable[[], None]] = {
    deed.__name__: deed
    for deed in (
        paced,
        hangs,
        dawdles,
        huge,
        overflows,
        claims_losses,
        sends_back_huge,
        steers,
        flips,
        scales,
        leans,
        biases,
        backdoors,
        brings_nothing,
        brings_noise,
        brings_the_first_again,
        lends,
        brings_anothers,
        leaves_out_a_layer,
        computes_coarsely,
        is_lazy,
        inflates,
        dies_between_forwards,
        dies_between_backwards,
        dies_with_a_loss,
        dies_owing_weights,
    )
}

if __name__ == "__main__":
    DEEDS[os.environ[DEED]]()
    if PACE in os.environ:
        sys.argv[2] = "NORMAL"  # it is the pace that counts, not what others leave of the processor
        _before_each_job(lambda: time.sleep(float(os.environ[PACE])), honest=0)
    main(sys.argv[1:])

"""The plan in force, run in simulated time by a process of its own, so that links and API are answered meanwhile.

ask_prediction ─▶ python -m coordinator.process.predictor < msgpack of a `Setting` > msgpack of a `Prediction`
"""

from __future__ import annotations

import sys
import time

import msgspec

from coordinator.process.planner import ask_process
from coordinator.world.members import members
from coordinator.world.prediction import Prediction, Setting, predict

KILL_S = 90.0
"""A prediction looks at its own budget (`prediction.BUDGET_S`) between two moments of its world."""


async def ask_prediction(setting: Setting) -> Prediction:
    """Has a process simulate a plan in force; whatever goes wrong with it is an answer with a sentence."""
    answer = await ask_process(__name__, "prediction", setting, Prediction, KILL_S)
    return Prediction(sentence=answer) if isinstance(answer, str) else answer


if __name__ == "__main__":
    asked = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Setting)
    sys.stdout.buffer.write(msgspec.msgpack.encode(predict(asked, members(), time.perf_counter)))

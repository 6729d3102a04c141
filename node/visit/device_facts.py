"""What is asked of the device before its owner is: what it is, and how fast for a stage of this run."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from node.compute.devices.choice import DeviceChoice
from protocol.base.errors import BadInputError
from protocol.run.run import RunConfig

ANSWER_S = 120.0
"""Loading torch on a slow disk takes half a minute."""
PROBE = "node.compute.probe_process"


class Question(msgspec.Struct, frozen=True):
    """See `node.compute.probe_process`."""

    config: RunConfig
    vocabulary: int
    threads: int
    device: str
    measure: bool
    cap_bytes: float | None = None
    """The most of the device's memory that the owner lends."""


class DeviceFacts(msgspec.Struct, frozen=True):
    """The answer."""

    label: str
    is_accelerator: bool
    why_no_accelerator: str
    tokens_per_s: float
    power_limit_w: float = 0.0
    """What the device may draw at most; 0: not known."""
    gpu: str = ""
    """How NVIDIA's driver calls the device; empty: it is none of that driver's."""
    problem: str = ""


def ask_device(question: Question) -> DeviceFacts:
    """Asks a process that ends before this returns. Raises `BadInputError` when the device cannot be used."""
    command = [sys.executable, "-P", "-m", PROBE]
    asked = msgspec.msgpack.encode(question)
    try:
        done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, timeout=ANSWER_S, check=True)  # noqa: S603
        facts = msgspec.json.decode(done.stdout, type=DeviceFacts)
    except subprocess.TimeoutExpired as error:
        raise BadInputError(
            f"the device could not be measured within {ANSWER_S:.0f} s: this computer is very busy, or the device's "
            "driver hangs; try again later (`--yes --no-benchmark` joins without)"
        ) from error
    except subprocess.CalledProcessError as error:
        raise BadInputError(
            f"the device could not be measured: the process that tried ended with status {error.returncode}; "
            "--no-benchmark joins without"
        ) from error
    except (subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise BadInputError(f"the device could not be measured: {error}; --no-benchmark joins without") from error
    if facts.problem:
        raise BadInputError(facts.problem)
    return facts


def check_device(choice: DeviceChoice) -> None:
    """Raises `BadInputError` where there is no such device. A process that ends loads torch for it, not this one."""
    ask_device(Question(RunConfig(), 257, 1, str(choice), False))

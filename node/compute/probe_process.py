"""Measures the device in a process of its own, so that none of its memory stays with the daemon that comes after.

python -m node.compute.probe_process < msgpack of (configuration, vocabulary, threads, device, measure) > JSON
"""

from __future__ import annotations

import sys

import msgspec

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import Device, open_device, why_no_accelerator
from node.compute.devices.works import first_line, why_not
from node.compute.probe import probe
from node.platform import gpu
from node.visit.device_facts import DeviceFacts, Question
from protocol.base.errors import BadInputError


def answer(question: Question) -> DeviceFacts:
    """Tokens a second through a stage's share of the layers, forward and backward; 0 when not asked to measure."""
    try:
        choice = DeviceChoice.parse(question.device)
        device = open_device(choice, None if question.cap_bytes is None else int(question.cap_bytes))
        if why := why_not(device.torch_device):
            raise BadInputError(f"--device {choice}: {device.label} does not work: {why}; use auto or cpu")
        device.keep_within()
        speed = _speed(question, device) if question.measure else 0.0
    except BadInputError as error:
        return DeviceFacts("", False, "", 0.0, problem=str(error))
    except RuntimeError as error:
        problem = f"--device {question.device}: it cannot be used: {first_line(error)}"
        return DeviceFacts("", False, "", 0.0, problem=problem)
    limit_w = gpu.power_limit_w(device.gpu) or 0.0
    not_used = why_no_accelerator() if choice.kind == "auto" else ""  # whoever names a device has chosen
    return DeviceFacts(device.label, device.is_accelerator, not_used, speed, limit_w, device.gpu)


def _speed(question: Question, device: Device) -> float:
    config = question.config
    layers = max(1, round(config.model.layers / max(1, config.stages.count)))
    try:
        return probe(config, question.vocabulary, 1, 1 + 2 * layers, question.threads, device).tokens_per_s
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        raise BadInputError(
            f"--device {question.device}: {device.label} has no room for a stage of this run beside what else is there "
            f"({first_line(error)}); close that, raise the limit gpu-memory if you set one, or use --device cpu"
        ) from None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(answer(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question))))

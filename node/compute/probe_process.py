"""Measures the device in a process of its own, so that none of its memory stays with the daemon that comes after.

python -m node.compute.probe_process < msgpack of (configuration, vocabulary, threads, device, measure) > JSON
"""

from __future__ import annotations

import sys

import msgspec

from node.compute.devices.choice import DeviceChoice
from node.compute.devices.device import open_device, why_no_accelerator
from node.compute.probe import probe
from node.platform import gpu
from node.visit.device_facts import DeviceFacts, Question
from protocol.base.errors import BadInputError


def answer(question: Question) -> DeviceFacts:
    """Tokens a second through a stage's share of the layers, forward and backward; 0 when not asked to measure."""
    config = question.config
    try:
        choice = DeviceChoice.parse(question.device)
        device = open_device(choice)
    except BadInputError as error:
        return DeviceFacts("", False, "", 0.0, problem=str(error))
    layers = max(1, round(config.model.layers / max(1, config.stages.count)))
    speed = 0.0
    if question.measure:
        speed = probe(config, question.vocabulary, 1, 1 + 2 * layers, question.threads, device).tokens_per_s
    limit_w = gpu.power_limit_w(device.gpu) or 0.0
    why_not = why_no_accelerator() if choice.kind == "auto" else ""  # whoever names a device has chosen
    return DeviceFacts(device.label, device.is_accelerator, why_not, speed, limit_w, device.gpu)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(answer(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question))))

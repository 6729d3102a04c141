"""`--device` of every command that computes."""

from __future__ import annotations

from typing import Any

import click

from node.compute.devices.choice import DeviceChoice


class DeviceType(click.ParamType[DeviceChoice]):
    """A word of `DeviceChoice.parse`."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceChoice:
        if isinstance(value, DeviceChoice):
            return value
        return DeviceChoice.parse(value)

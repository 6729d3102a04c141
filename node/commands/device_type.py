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


class DevicesType(click.ParamType[tuple[DeviceChoice, ...]]):
    """Words of `DeviceChoice.parse_all`."""

    name = "devices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[DeviceChoice, ...]:
        if isinstance(value, tuple):
            return value
        return DeviceChoice.parse_all(value)

"""`barnraise plan …` and `barnraise schedule …`: planning without a daemon, loaded when asked for."""

from __future__ import annotations

from importlib import import_module

import click


class _LazyGroup(click.Group):
    """A group whose commands are named as `module:attribute` and imported only when used."""

    def __init__(self, lazy: dict[str, str], help: str) -> None:
        super().__init__(help=help)
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module_name, attribute = self._lazy[cmd_name].split(":")
        command = getattr(import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command


plan = _LazyGroup(
    {
        "partition": "coordinator.commands.partition:partition",
        "schedule": "coordinator.commands.schedule:plan_schedule",
        "tune": "coordinator.commands.tune:plan_tune",
        "placement": "coordinator.commands.placement:plan_placement",
        "routes": "coordinator.commands.routes:plan_routes",
        "run": "coordinator.commands.run:plan_run_command",
        "compare": "coordinator.commands.compare:plan_compare",
    },
    help="Plan a run, or a piece of one, without starting a daemon.",
)
schedule = _LazyGroup(
    {"show": "coordinator.commands.show:show", "gallery": "coordinator.commands.gallery:gallery"},
    help="Show the order in which a pipeline's nodes work, and what it costs.",
)

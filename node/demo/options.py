"""What a demo is asked to do, and the run that follows from it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from node.compute.devices.choice import DeviceChoice
from protocol.base.errors import BadInputError
from protocol.run.changes import RunChange, check_changes, settled_as
from protocol.run.config_file import change_run, load_run
from protocol.run.run import AuditSection, CheckpointSection, RunConfig, ValidationSection

VALIDATION = ValidationSection(every_steps=50, batches=4)
"""Of a demo without a run file: four forwards in fifty steps of eight microbatches are 0.3 % of its work."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command line of `barnraise demo`. None means: as the run file, or the default, says."""

    steps: int | None = None
    seed: int | None = None
    volunteers: int = 3
    servers: int | None = None
    """None: as many as the stages have places."""
    stages: int | None = None
    delay: int | None = None
    data: str | None = None
    config: Path | None = None
    settings: tuple[str, ...] = ()
    """KEY=VALUE of any key of RUN.toml; the other options count more."""
    chaos: int = 0
    kill_coordinator: int | None = None
    kill_server: int | None = None
    kill_all_volunteers: int | None = None
    reference: bool = False
    changes: Path | None = None
    """What `barnraise run changes --json` printed, for the reference."""
    threads: int = 1
    """Torch's threads of the reference; volunteers choose their own."""
    device: DeviceChoice = field(default_factory=lambda: DeviceChoice("cpu"))
    """What computes tasks. Weights come out the same to the last bit on one kind of device only, so the reference has
    the same one; and a toy is done sooner by a processor than three processes have woken a graphics card."""
    plain: bool = False
    summary: Path | None = None
    out: Path = Path("demo-out")
    state: Path | None = None

    def run(self) -> RunConfig:
        """The run: the file's or the defaults, changed by what the command line says. Raises `BadInputError`."""
        config = (
            RunConfig(validation=VALIDATION, audit=AuditSection(rate=0.0))
            if self.config is None
            else load_run(self.config)
        )
        config = change_run(config, self.settings)
        replace = msgspec.structs.replace
        if self.steps is not None:
            config = replace(config, steps=self.steps)
        if self.seed is not None:
            config = replace(config, seed=self.seed)
        if self.stages is not None:
            config = replace(config, stages=replace(config.stages, count=self.stages))
        if self.delay is not None:
            config = replace(config, batch=replace(config.batch, delay=self.delay))
        if self.data is not None:
            config = replace(config, data=replace(config.data, source=_whole_path(self.data)))
        if self.reference and config.is_open and (told := self._changes_told()) and told[0].from_step == 0:
            config = settled_as(config, told[0])  # the planner's word stands at the head
        config.validate()
        self._check_stages(config)
        for option, step in (
            ("--kill-coordinator", self.kill_coordinator),
            ("--kill-server", self.kill_server),
            ("--kill-all-volunteers", self.kill_all_volunteers),
        ):
            if step is not None and not 0 < step < config.steps:
                raise BadInputError(f"{option}: step {step} is not between 1 and {config.steps - 1}")
        return config

    def server_count(self, config: RunConfig) -> int:
        """Servers that are started."""
        stages = config.stages
        return self.servers or stages.count * (stages.front_servers + stages.back_servers)

    def _check_stages(self, config: RunConfig) -> None:
        """Raises `BadInputError` naming the key that a demo with these servers cannot do."""
        stages = config.stages
        if self.reference and config.is_open:
            key = "stages.cut" if stages.count else "stages.count"
            raise BadInputError(
                f"{key}: --reference plans nothing; name what a plan has chosen (--summary tells it, and --changes of a"
                " run that was changed)"
            )
        places = max(1, stages.count) * (stages.front_servers + stages.back_servers)
        if stages.count == 0 and self.servers is None:
            raise BadInputError('stages.count: "auto" needs --servers, for how many there are decides')
        if self.servers is not None and self.servers < places:
            count = f"{self.servers} server{'' if self.servers == 1 else 's'}"
            wanted = 'at the least, with "auto"' if stages.count == 0 else f"for {stages.count} stages"
            raise BadInputError(f"stages.count: {count}, but {places} are wanted {wanted}")

    def changes_made(self, config: RunConfig) -> tuple[RunChange, ...]:
        """The changes of the run that the reference does again. Raises `BadInputError`."""
        found = self._changes_told()
        check_changes(config, found)
        return found

    def _changes_told(self) -> tuple[RunChange, ...]:
        """Those in the file. Raises `BadInputError`."""
        if self.changes is None:
            return ()
        if not self.reference:
            raise BadInputError("--changes: only --reference takes it; a run is changed with `barnraise run set`")
        try:
            found = msgspec.json.decode(self.changes.read_bytes(), type=tuple[RunChange, ...])
        except OSError as error:
            raise BadInputError(f"--changes: {self.changes} cannot be read: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise BadInputError(
                f"--changes: {self.changes} is not what `run changes --json` prints: {error}"
            ) from error
        if any(change.from_step < 0 for change in found):
            raise BadInputError(f"--changes: {self.changes} has a change without its step: ask again after a step")
        return found


def with_checkpoints(config: RunConfig, folder: Path) -> RunConfig:
    """The run with checkpoints in one folder that all its servers share."""
    section: CheckpointSection = msgspec.structs.replace(config.checkpoint, folder=str(folder.absolute()))
    return msgspec.structs.replace(config, checkpoint=section)


def to_toml(config: RunConfig) -> str:
    """The run as a `RUN.toml`. JSON's numbers and strings are TOML's too."""
    lines: list[str] = []
    sections: list[str] = []
    for name, value in msgspec.to_builtins(config).items():
        if isinstance(value, dict):
            sections += ["", f"[{name}]", *(f"{key} = {json.dumps(item)}" for key, item in value.items())]
        else:
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join([*lines, *sections]) + "\n"


def _whole_path(source: str) -> str:
    """Servers run elsewhere: a path of the command line is made whole."""
    return source if source.startswith("builtin:") else str(Path(source).absolute())

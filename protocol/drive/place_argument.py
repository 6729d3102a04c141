"""A place for checkpoints on the command line: a folder, or the URL of an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from protocol.base.errors import BadInputError
from protocol.run.places import check_url, is_url


class PlaceArgument(click.ParamType["Path | str"]):
    """A `Path`, or a URL that has the right form, as `str`."""

    name = "folder or URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        if isinstance(value, Path) or not is_url(str(value)):
            path = Path(value)
            try:
                is_file = path.exists() and not path.is_dir()
            except OSError as error:
                self.fail(f"{path}: {error.strerror}", param, ctx)
            if is_file:
                self.fail(f"{path} is a file", param, ctx)
            return path
        try:
            check_url("it", str(value))
        except BadInputError as error:
            self.fail(str(error), param, ctx)
        return str(value)

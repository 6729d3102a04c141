"""`barnraise monitoring write DIR`: everything that Prometheus and Grafana need to watch a run."""

from __future__ import annotations

import glob
import shlex
from pathlib import Path

import click

from coordinator.commands.status import DEFAULT_URL
from coordinator.monitoring.files import monitoring_files
from protocol.base.errors import BadInputError
from protocol.drive.addresses import is_web_address


def folders_of(place: Path) -> list[str]:
    """The folders that a name with `*` in it stands for, and those of further cards in them. Prometheus itself takes a
    `*` in a file's name alone. Raises `BadInputError` where there is none."""
    whole = str(place.absolute())
    found = [whole] if "*" not in whole else sorted(name for name in glob.glob(whole) if Path(name).is_dir())
    if not found:
        raise BadInputError(f"--here: there is no folder {whole}")
    further = [sorted(glob.glob(f"{glob.escape(name)}/device-*")) for name in found]
    return [folder for name, cards in zip(found, further, strict=True) for folder in (name, *cards)]


@click.group()
def monitoring() -> None:
    """Watch runs with Prometheus and Grafana."""


@monitoring.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR")
@click.argument("coordinators", nargs=-1, metavar="[URL]...")
@click.option(
    "--here",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    metavar="STATE",
    help="A daemon's state folder on this machine, to be scraped too; may be repeated, and hold * for any name that "
    "is there now. For owners of lent computers, whose coordinator is elsewhere; the Prometheus of the compose file "
    "sees no such folder.",
)
def write(folder: Path, coordinators: tuple[str, ...], here: tuple[Path, ...]) -> None:
    """Write prometheus.yml, rules, dashboards, a console, a runbook and a compose file into DIR.

    URL is a coordinator's status API, by default the one of a coordinator on this computer; it is asked (at /api/sd)
    whom to scrape. Files of an earlier version are replaced.
    """
    urls = coordinators or (() if here else (DEFAULT_URL,))
    for url in urls:
        if not is_web_address(url):
            raise BadInputError(f"{url}: not an address of a coordinator's status API (http://HOST:PORT)")
    files = monitoring_files(urls, [found for place in here for found in folders_of(place)])
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise BadInputError(f"{error.filename or folder}: cannot be written: {error.strerror}") from error
    config, consoles = (shlex.quote(str(folder / name)) for name in ("prometheus.yml", "consoles"))
    compose = f", or docker compose up -d in {folder}" if not here else ""
    start = "start     " if not here else "as yourself"  # who else may look into a state folder?
    click.echo(
        f"{folder}: {len(files)} files\n"
        f"  check      promtool check config {config}\n"
        # Prometheus by itself answers everybody, on all addresses.
        f"  {start} prometheus --config.file={config} --web.console.templates={consoles}"
        " --web.listen-address=127.0.0.1:9090\n"
        "  look       http://127.0.0.1:9090/consoles/barnraise.html\n"
        f"  Grafana    import {folder / 'dashboards'}/*.json{compose}\n"
        f"  an alert?  {folder / 'RUNBOOK.md'}"
    )

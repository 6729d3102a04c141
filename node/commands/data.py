"""`barnraise data prepare | show`: text tokenized once, for as many runs as want it."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import click

from protocol.base.errors import BadInputError
from protocol.base.printable import printable
from protocol.run.mixture import NAME_MAX

TOLD_EVERY_S = 5.0
_SHOWN_CHARACTERS = 2000


@click.group()
def data() -> None:
    """Prepare text for runs, and look at what was prepared."""


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write; it must be new.")
@click.option(
    "--tokenizer", default="bytes", show_default=True, help="bytes, bpe:SIZE (trained on it), or a tokenizer.json."
)
@click.option("--text-field", default="text", show_default=True, help="The jsonl field or table column with the text.")
def prepare(sources: tuple[str, ...], out: Path, tokenizer: str, text_field: str) -> None:
    """Tokenize each SOURCE (a file, folder or pattern as in RUN.toml) into the folder --out.

    Give a SOURCE a name with NAME=SOURCE; `data.mixture` in RUN.toml then says how often each comes. Copy the folder to
    every server of stage 0 and start them with --data FOLDER.
    """
    from node.data.prepared import prepare as write

    told = time.monotonic()

    def progress(name: str, tokens: int) -> None:
        nonlocal told
        if time.monotonic() - told >= TOLD_EVERY_S:
            told = time.monotonic()
            click.echo(f"{name}: {tokens:,} tokens", err=True)

    made = write([_named(source) for source in sources], text_field, tokenizer, out, progress)
    for part in made.parts:
        click.echo(f"{part.name:20} {part.tokens:>18,} tokens {part.documents:>14,} documents")
    click.echo(f"hash {made.data_hash}")
    lines = [f'source = "{out.absolute()}"', 'tokenizer = "prepared"']
    if len(made.parts) > 1:
        words = " ".join(f"{part.name}={part.tokens / made.tokens:.3g}" for part in made.parts)
        lines.append(f'# mixture = "{words}"')
    click.echo("\n".join(["in RUN.toml:", "[data]", *lines]))


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Read all of it and compare the hash.")
@click.option("--document", type=click.IntRange(min=0), help="Print this document of the first part, or of --part.")
@click.option("--part", default="", help="The part that --document counts in.")
def show(folder: Path, check: bool, document: int | None, part: str) -> None:
    """Say what a prepared FOLDER holds."""
    from node.data.prepared import INDEX, PreparedFolder, is_prepared

    if not is_prepared(str(folder)):
        raise BadInputError(f"FOLDER: there is no {INDEX} in {folder}")
    found = PreparedFolder.open(str(folder))
    about = found.about
    if document is not None:
        names = [each.name for each in about.parts]
        if part and part not in names:
            raise BadInputError(f"--part: there is no part {part}; the folder has {', '.join(names)}")
        tokens = found.document(names.index(part) if part else 0, document, _SHOWN_CHARACTERS * 4)
        text = found.tokenizer.decode(tokens)
        # What was found on the web may hold orders to a terminal.
        click.echo(printable(text[:_SHOWN_CHARACTERS], keep="\n") + (" …" if len(text) > _SHOWN_CHARACTERS else ""))
        return
    for each in about.parts:
        click.echo(f"{printable(each.name):20} {each.tokens:>18,} tokens {each.documents:>14,} documents")
    click.echo(
        f"tokenizer {printable(about.tokenizer)}, {about.vocabulary:,} tokens\nhash {printable(about.data_hash)}"
    )
    if check:
        found.check()
        click.echo("every token is what was written")


def _named(source: str) -> tuple[str, str]:
    """(name, source): the name before the first `=`, or the path's own, made fit."""
    name, equals, rest = source.partition("=")
    if equals and "/" not in name and not os.path.exists(source):  # which is an answer for any text
        return name, rest
    stem = source.removeprefix("builtin:").rstrip("/").rsplit("/", 1)[-1].split(".")[0]
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-")[:NAME_MAX] or "text", source

"""What the owner of a lent computer says to it from another terminal: pause, resume, finish, limits, top, leave.

Exit codes: 0 fine, 1 an error, 2 a wrong word, 3 no daemon runs here, 4 one runs and does not answer as it should.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from platformdirs import user_state_path
from rich.console import Console
from rich.live import Live
from rich.text import Text

from node.commands.say import columns, say, shown_path
from node.machine.drain import DRAIN_S, LAST_NEWS_S
from node.owner.consent import read_consents, withdraw_consent
from node.owner.limits import KEYS, OwnerLimits, key_named, read_limits, shown, with_value, write_limits
from node.owner.tally import signed_in_words
from node.owner.thanks import SignedThanks, given, given_by, read_thanks, thanks_files
from node.owner.units import duration
from node.owner.words import describe, describe_limits, headline
from node.platform.local_socket import NotRunningError, NotWellError, ask
from node.platform.places import limits_file, noted_folders, settings_folder
from protocol.base.errors import BadInputError

NOT_RUNNING, NOT_WELL = 3, 4
TOP_S = 1.0
LEAVE_S = DRAIN_S + LAST_NEWS_S + 15.0
"""How long `leave` waits for the end: what a node takes for it, and what a busy machine adds."""
LEAVE_LOOK_S = 0.25
ENDED = (
    "It has ended: nothing runs here for a run any more. `barnraise thanks` shows what this computer gave, `barnraise "
    "join` comes back."
)
_KEPT_TO = "Those that the one with this state folder keeps to, with the limits of its command line."
_STATE = click.option(
    "--state", type=click.Path(path_type=Path, file_okay=False), help="The state folder of the one that is meant."
)


def answers(state: Path | None, order: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """What every daemon here (or the one of `state`) answers to an order. Ends the command where none does."""
    found, unwell = heard(state, order)
    if unwell:
        click.echo(unwell, err=True)
        sys.exit(NOT_WELL)
    if not found:
        where = f"from {state}" if state is not None else "here"
        click.echo(f"No lent computer runs {where}: is `barnraise join` running?", err=True)
        sys.exit(NOT_RUNNING)
    return found


def heard(state: Path | None, order: dict[str, Any]) -> tuple[list[tuple[Path, dict[str, Any]]], str]:
    """What every daemon here answers to an order, and what is wrong with one that runs and does not answer."""
    found, unwell = [], ""
    for folder in [state] if state is not None else noted_folders():
        try:
            answer = ask(folder, order)
        except NotRunningError:
            continue
        except NotWellError as error:
            unwell = str(error)
            continue
        if "error" in answer:
            raise BadInputError(answer["error"])
        found.append((folder, answer))
    return found, unwell


def _tell(state: Path | None, order: dict[str, Any]) -> None:
    found = answers(state, order)
    for folder, answer in found:
        say(headline(answer) + _which(folder, found))


@click.command(context_settings={"ignore_unknown_options": True})  # "-5" is a wrong time, and no option
@click.argument("words", metavar="[TIME]", nargs=-1)
@click.option("--for", "for_text", metavar="TIME", help="The same: barnraise pause --for 2h.")
@_STATE
def pause(words: tuple[str, ...], for_text: str | None, state: Path | None) -> None:
    """Stop working for the run, at once; the device's memory is free within a second, and no work is lost.

    With TIME, as in 10min or 2h, only so long: then it goes on by itself.
    """
    behind = " ".join(words)
    if words and for_text is not None:
        raise BadInputError(f"pause: {behind!r} or {for_text!r}? Say it once, as in: barnraise pause --for 2h")
    for_s = None
    if words or for_text is not None:
        for_s = duration("--for" if for_text is not None else "pause", behind if for_text is None else for_text)
    _tell(state, {"verb": "pause", "for_s": for_s})


@click.command()
@_STATE
def resume(state: Path | None) -> None:
    """Go on after `pause` or `finish`."""
    _tell(state, {"verb": "resume"})


@click.command()
@_STATE
def finish(state: Path | None) -> None:
    """Finish what was begun, then pause."""
    _tell(state, {"verb": "finish"})


@click.command()
@click.option("--for-good", is_flag=True, help="Take back the yes to the run, too: the next start asks again.")
@_STATE
def leave(for_good: bool, state: Path | None) -> None:
    """Finish what was begun and end the program; waits for that, and shows what this computer gave."""
    found = answers(state, {"verb": "leave", "for_good": for_good})
    for folder, answer in found:
        if sys.stdout.isatty():
            say(headline(answer))
        try:
            words = last_words(folder, answer)
        except KeyboardInterrupt:
            words = "It ends by itself, as soon as what was begun is finished."
        say(words)


def last_words(folder: Path, answer: dict[str, Any]) -> str:
    """Waits until the daemon has ended, and says what was given, by its own count and by what the run has signed."""
    deadline = time.monotonic() + LEAVE_S
    while time.monotonic() < deadline:
        try:
            answer = ask(folder, {"verb": "status"})
        except NotRunningError:
            break
        except NotWellError:
            pass  # its door is closing
        time.sleep(LEAVE_LOOK_S)
    else:
        return f"It still finishes what was begun after {LEAVE_S:.0f} s; Ctrl-C where it runs ends it at once."
    if not answer["begun"] or not answer["ever"]["tasks"]:
        return str(answer["thanks"])
    signed = "The run has not signed any of it yet: it signs what is in closed steps, and says so at the next visit."
    files = thanks_files(folder)
    if (found := given_by(files)) is not None:
        words = signed_in_words(found, len(files) > 1)
        signed = f"Signed by the run, for ever: {words}: `barnraise thanks` shows and checks it."
    return f"{answer['thanks']}\n{signed}"


def limits_of(state: Path | None) -> dict[str, str]:
    """By name, as people write them: those of the file, or those that the daemon of `state` keeps to, with its
    command line's."""
    if state is None:
        return shown(read_limits(limits_file()))
    ((_, answer),) = answers(state, {"verb": "status"})
    return dict(answer["limits"])


@click.group(invoke_without_command=True)
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help=_KEPT_TO)
@click.pass_context
def limits(context: click.Context, state: Path | None) -> None:
    """Show or change what may be used of this computer, when, and how fast. Holds for every run on it.

    Without a command it lists every limit and what it means. The list @games of `while-not` stands for any program that
    lies in a game store's folder (Steam, Heroic, Epic, GOG, Xbox, Riot, EA, Ubisoft, Blizzard), uses the GPU beside the
    run (where NVIDIA's driver tells) or, on Windows, fills the screen; the stores themselves, moving wallpapers and
    what draws the desktop are none, and -NAME leaves out another, as in: while-not @games,-wallpaper64
    """
    if context.invoked_subcommand is None:
        click.echo(describe_limits(limits_of(state), {key.name: key.meaning for key in KEYS}, columns()))
        say(f"\nIn {limits_file()}; change one with: barnraise limits set up '5 Mbit/s'")


@limits.command("get")
@click.argument("name")
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), help=_KEPT_TO)
def get_limit(name: str, state: Path | None) -> None:
    """Print one limit."""
    key = key_named(name)
    click.echo(limits_of(state)[key.name])


@limits.command("set", context_settings={"ignore_unknown_options": True})  # "-5" is a wrong value, and no option
@click.argument("name")
@click.argument("value", nargs=-1, required=True)
@_STATE
def set_limit(name: str, value: tuple[str, ...], state: Path | None) -> None:
    """Change one limit: `barnraise limits set up 5 Mbit/s`. A daemon that runs follows within a second.

    With --state that one is told directly: it writes the file that it was started with, and what its own command line
    said of this limit counts no more.
    """
    key, text = key_named(name), " ".join(value)
    if state is None:
        changed = with_value(read_limits(limits_file()), name, text)
        write_limits(limits_file(), changed)
        now = shown(changed)
    else:
        with_value(OwnerLimits(), name, text)
        ((_, answer),) = answers(state, {"verb": "limits", "values": {key.name: text}})
        now = answer["limits"]
    click.echo(f"{key.name} = {now[key.name]}")


@click.group(invoke_without_command=True)
@click.pass_context
def consent(context: click.Context) -> None:
    """Show the runs to which you said yes."""
    if context.invoked_subcommand is not None:
        return
    consents = read_consents(settings_folder())
    for run_id, one in consents.items():
        when = datetime.fromtimestamp(one.since_unix_s).strftime("%Y-%m-%d")
        click.echo(f"{one.run:24} {run_id}  since {when}")
    if not consents:
        click.echo("You have not said yes to a run, or only with --yes, which is not kept.")


@consent.command("withdraw")
@click.argument("run")
def withdraw(run: str) -> None:
    """Take back the yes to RUN (its name or id): it asks again before its next start."""
    known = read_consents(settings_folder())
    found = [run_id for run_id, one in known.items() if run in (one.run, run_id)]
    if not found:
        raise BadInputError(f"consent: there is no yes to {run!r} that could be taken back")
    for run_id in found:
        withdraw_consent(settings_folder(), run_id)
    click.echo("Taken back. One that runs now goes on until `barnraise leave`.")


@click.command()
@_STATE
def top(state: Path | None) -> None:
    """Watch a lent computer until Ctrl-C: what it does, why not more, what it gives."""
    show(state, TOP_S)


def show(state: Path | None, every_s: float, console: Console | None = None) -> None:
    """Redraws the status on a screen of its own until Ctrl-C, or until what was watched has ended, which is said then;
    where there is no terminal it is printed once."""
    console = console or Console(highlight=False, markup=False)
    text = text_of(answers(state, {"verb": "status"}))
    if not console.is_terminal:
        click.echo(text)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=True) as live:
        while text:
            live.update(Text(text + "\n\npause, resume, finish, limits, leave: in another terminal"), refresh=True)
            time.sleep(every_s)
            found, unwell = heard(state, {"verb": "status"})
            text = text_of(found) or unwell
    if not text:
        console.print(ENDED)


def text_of(found: list[tuple[Path, dict[str, Any]]]) -> str:
    return "\n\n".join(describe(answer) + _which(folder, found) + _page(folder) for folder, answer in found)


def _which(folder: Path, found: list[tuple[Path, dict[str, Any]]]) -> str:
    """Where several run on a computer: what to name with --state to mean this one."""
    return f"\nstate   {shown_path(folder)}" if len(found) > 1 else ""


def _page(folder: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        url = json.loads((folder / "control.json").read_text()).get("page")
        return f"\npage    {url}" if url else ""
    return ""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@_STATE
def thanks(file: Path | None, state: Path | None) -> None:
    """Show what this computer has given, signed by the run's coordinator, and check the signature.

    FILE: signed thanks of anybody; without it, those that lie in the state folders of this computer.
    """
    kept = [path for folder in _thanked_folders(state) for path in thanks_files(folder)]
    files = kept if file is None else [file]
    if not files:
        raise BadInputError(
            "thanks: none were signed for this computer yet; a run signs what its ledgers accepted, and says so every "
            "half minute and when you leave"
        )
    say("\n\n".join(f"{describe_thanks(read_thanks(path))}\nThey lie in {path}" for path in files))


def _thanked_folders(state: Path | None) -> list[Path]:
    if state is not None:
        return [state]
    kept = sorted(path for path in user_state_path("barnraise").glob("*/volunteer*") if thanks_files(path))
    return list(dict.fromkeys([*noted_folders(), *kept]))


def describe_thanks(found: SignedThanks) -> str:
    """What `barnraise thanks` prints."""
    thanks = found.thanks
    since, until = (
        datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d") for unix_s in (thanks.since_unix_s, thanks.until_unix_s)
    )
    when = f"on {since}" if since == until else f"from {since} to {until}"
    return "\n".join(
        (
            f"{thanks.name or 'This computer'} has given the run {thanks.run}, {when}:",
            f"  {signed_in_words(given(thanks))}.",
            f"Signed by the run's coordinator {found.coordinator[:16]} for the computer {thanks.node[:16]}.",
            "The signature holds.",
        )
    )


def status_here(as_json: bool, state: Path | None = None) -> str | None:
    """For `barnraise status`: the lent computers that run here (or the one of `state`), or None where there is none.
    May end the command."""
    if state is not None:
        running = answers(state, {"verb": "status"})
        return json.dumps([answer for _, answer in running], indent=1) if as_json else text_of(running)
    running = []
    for folder in noted_folders():
        with contextlib.suppress(NotRunningError):
            try:
                running.append((folder, ask(folder, {"verb": "status"})))
            except NotWellError as error:
                click.echo(str(error), err=True)
                sys.exit(NOT_WELL)
    if not running:
        return None
    return json.dumps([answer for _, answer in running], indent=1) if as_json else text_of(running)

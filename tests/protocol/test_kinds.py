"""The table of messages is what runs: what it says of a handler is found in that handler's code, and nothing beyond."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest

from protocol import messages
from protocol.base.ids import TICKET_BYTES
from protocol.base.limits import TASKS_MAX, TEXT_MAX
from protocol.base.message import Message, Work
from protocol.kinds import HANDLERS, KINDS, MESSAGES, OF_DEVICE, OF_SERVER, Kind, taken_by
from protocol.link.codec import tensors_of
from protocol.message_page import bounds_of, page
from tests.architecture import ROOT
from tests.protocol.samples import sample

_NAMES = {kind.__name__ for kind in MESSAGES}


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(import_module(module)))


def _imported(tree: ast.Module) -> set[str]:
    """Kinds among what a module imports: a class of another module may have a kind's name."""
    return {
        name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("protocol.")
        for name in node.names
    } & _NAMES


def _distinguished(module: str) -> set[str]:
    """Kinds that a module tells from others, by `match` or `isinstance`."""
    found, tree = set(), _tree(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            found.add(node.cls.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            found |= {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
    return found & _imported(tree)


def _named(module: str) -> set[str]:
    """Kinds that a module's functions, methods and calls name."""
    tree = _tree(module)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & _imported(tree)


def test_the_table_has_every_kind_once() -> None:
    """What is defined as a message has a row, and a row is of a message that the coder of messages knows."""
    defined = {
        each for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, Message) and each not in (Message, Work)
    }  # fmt: skip
    assert defined == set(MESSAGES) and len(MESSAGES) == len(set(MESSAGES))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.message.__name__)
def test_a_row_says_who_takes_the_kind(kind: Kind) -> None:
    """Each handler is a module that deals with it: by telling it from others, or in a method of its own."""
    assert kind.handlers and kind.ways
    for handler in kind.handlers:
        if handler not in ("pools", "desk"):  # they are given the tasks or the node that it names
            assert kind.message.__name__ in _named(HANDLERS[handler]), f"{HANDLERS[handler]} knows nothing of it"
    receivers = {receiver for _, receiver in kind.ways}
    assert ("coordinator" in kind.handlers) == ("coordinator" in receivers)
    if issubclass(kind.message, Work) and not set(kind.handlers).isdisjoint(OF_SERVER):
        assert kind.place and "server" in receivers


def test_what_dispatchers_tell_apart_is_what_the_table_gives_them() -> None:
    """A message that is handled somewhere the table does not say is found here."""
    for module, handlers in (
        ("coordinator.live.core", ("coordinator",)),
        ("node.core", ("node", "connector", "driver")),
        ("node.links.connector", ("connector",)),
        ("node.measure.meter", ("meter",)),
        ("node.server.ledger", ("ledger",)),
        ("node.server.decider", ("decider",)),
        ("node.server.buddy", ("buddy",)),
        ("node.volunteer.volunteer", ("volunteer",)),
        ("node.volunteer.auditor", ("auditor",)),
    ):
        given = {kind.__name__ for kind in taken_by(*handlers)}
        assert _distinguished(module) <= given, module
        if handlers not in (("node", "connector", "driver"),):
            assert _distinguished(module) == given, module
    by_intake = {kind.__name__ for kind in taken_by(*OF_SERVER)}
    others = {kind.__name__ for kind in taken_by("ledger", "decider", "buddy")}
    assert _distinguished("node.server.intake") == by_intake - others


def test_the_page_of_all_messages_is_made_from_the_code() -> None:
    """Who changes a message, its bounds or who may send it makes the page anew (`python -m protocol.message_page`)."""
    made = page()
    assert (ROOT / "protocol" / "MESSAGES.md").read_text() == made
    assert all(f"| `{kind.message.__name__}` |" in made for kind in KINDS)


def test_a_page_shows_every_bound_that_a_message_has() -> None:
    """Of lists, texts and bytes, also of those within a list; a plan and a run have files of their own."""
    assert bounds_of(messages.Bye) == [f"reason ≤ {TEXT_MAX}"]
    assert bounds_of(messages.Summed) == [
        f"tasks ≤ {TASKS_MAX:,}", f"tickets ≤ {TASKS_MAX:,}", f"tickets[].mac ≤ {TICKET_BYTES}",
    ]  # fmt: skip
    assert "plan: see `Plan`" in bounds_of(messages.PlanChanged)
    assert not bounds_of(messages.Ping)


def test_places_narrow_what_servers_may_say_to_each_other() -> None:
    """A kind about work has a place where a server's roles take it, and none where only a device does."""
    for kind in KINDS:
        to_server = not set(kind.handlers).isdisjoint(OF_SERVER)
        beside_device = set(kind.handlers) <= set(OF_DEVICE)
        assert bool(kind.place) == (to_server or kind.message is messages.CheckpointDone)
        assert not (beside_device and kind.place)


def test_only_what_has_tensors_says_what_they_are() -> None:
    """And whatever has some says it: the metric's labels are all bytes, told apart."""
    for kind in KINDS:
        assert (kind.carries != "control") == bool(tensors_of(sample(kind.message)))
        assert not kind.is_long or kind.carries != "control"

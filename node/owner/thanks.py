"""The thanks that a run's coordinator has signed, as the owner keeps them: one file in the state folder.

A run says what it believes; only what its coordinator signed for this very computer and run is kept, and only what was
kept is shown. The file can be checked by anybody, on any computer: `barnraise thanks FILE`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from node.owner.tally import Given
from node.platform.places import device_folders
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.base.ids import NodeId
from protocol.drive.durable import replace_durably
from protocol.trust.identity import node_id
from protocol.trust.thanks import Thanks, open_thanks

FILE = "thanks.json"
FILE_BYTES_MAX = 64 << 10
"""One has 500 bytes."""


class _Kept(msgspec.Struct, frozen=True):
    coordinator_key: bytes
    signed: bytes


@dataclass(frozen=True, slots=True)
class SignedThanks:
    """Checked thanks, and who signed them."""

    thanks: Thanks
    coordinator: NodeId


def read_thanks(path: Path) -> SignedThanks:
    """Raises `BadInputError` when they cannot be read, or the signature does not hold."""
    try:
        with path.open("rb") as file:
            kept = msgspec.json.decode(file.read(FILE_BYTES_MAX), type=_Kept)
        return SignedThanks(open_thanks(kept.signed, kept.coordinator_key), node_id(kept.coordinator_key))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadInputError(f"{path}: holds no thanks: {error}") from None
    except RemoteProtocolError as error:
        raise BadInputError(f"{path}: these thanks are worth nothing: {error.detail}") from None


def given(thanks: Thanks) -> Given:
    return Given(float(thanks.tokens), float(thanks.tasks), float(thanks.working_s))


class ThanksBook:
    """Takes what the coordinator says, and keeps what it has signed for this computer and run."""

    def __init__(self, folder: Path, coordinator_key: bytes, run_id: bytes, node: NodeId) -> None:
        self._path = folder / FILE
        self._key = coordinator_key
        self._run_id = run_id
        self._node = node
        self._said = b""
        self._signed = b""
        """The newest that are good."""
        self._saved = b""
        self._base: Given | None = None
        """What had been given when this process first heard of it."""
        self.newest: Thanks | None = None
        self.complaint = ""
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        """What cannot be used is named, and comes again from the coordinator."""
        try:
            found = read_thanks(self._path).thanks
        except BadInputError as error:
            self.complaint = str(error)
            return
        if (found.run_id, found.node) == (self._run_id, self._node):
            self.newest = found

    def take(self, signed: bytes) -> None:
        """What came with the news. What is not signed for this computer and run is no thanks."""
        if not signed and self._base is None:
            self._base = Given()
        if signed in (b"", self._said):
            return
        self._said = signed
        try:
            thanks = open_thanks(signed, self._key)
        except RemoteProtocolError as error:
            self.complaint = f"thanks from the coordinator that are worth nothing: {error.detail}"
            return
        if (thanks.run_id, thanks.node) != (self._run_id, self._node):
            self.complaint = "thanks from the coordinator that are for somebody else"
            return
        if self._base is None:
            self._base = given(thanks)
        self.newest, self._signed, self.complaint = thanks, signed, ""

    @property
    def ever(self) -> Given | None:
        return None if self.newest is None else given(self.newest)

    @property
    def visit(self) -> Given | None:
        """Of this process; None while the coordinator has said nothing."""
        if self.newest is None or self._base is None:
            return None
        now, before = given(self.newest), self._base
        return Given(now.tokens - before.tokens, now.tasks - before.tasks, now.working_s - before.working_s)

    def save(self) -> None:
        """Raises `OSError`; nothing is lost, since the coordinator says it all again."""
        if self._signed == self._saved:
            return
        replace_durably(self._path, msgspec.json.encode(_Kept(self._key, self._signed)))
        self._saved = self._signed


class ThanksShelf:
    """The books of all devices of this computer, each a member of the run with a key of its own."""

    def __init__(self, books: Sequence[ThanksBook] = ()) -> None:
        self._books = tuple(books)

    def take(self, signed: Sequence[bytes | None]) -> None:
        """What came with each one's news, in the order of the books; None: it has heard nothing yet."""
        for book, one in zip(self._books, signed, strict=False):
            if one is not None:
                book.take(one)

    @property
    def complaint(self) -> str:
        return next((book.complaint for book in self._books if book.complaint), "")

    @property
    def visit(self) -> Given | None:
        return _sum([book.visit for book in self._books])

    @property
    def ever(self) -> Given | None:
        return _sum([book.ever for book in self._books])

    def save(self) -> None:
        """Raises `OSError`, as a book does."""
        for book in self._books:
            book.save()


def given_by(files: Sequence[Path]) -> Given | None:
    """What these thanks say together; what cannot be used is left out. None where nothing can."""
    found: list[Given | None] = []
    for file in files:
        with suppress(BadInputError):
            found.append(given(read_thanks(file).thanks))
    return _sum(found)


def _sum(amounts: Sequence[Given | None]) -> Given | None:
    """Of those that are known; None where none is. Time is the length of the run's steps, which hold tasks of several
    devices at once: that of the device with most is what all have taken at least."""
    known = [amount for amount in amounts if amount is not None]
    if not known:
        return None
    return replace(sum(known, Given()), working_s=max(amount.working_s for amount in known))


def thanks_files(state: Path) -> list[Path]:
    """Those of a state folder's devices."""
    return [folder / FILE for folder in device_folders(state) if (folder / FILE).is_file()]

"""Where checkpoints lie: a folder, or the URL of a prefix in an object store. What its text says, and no more.

    /shared/checkpoints   s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX   file:///shared/checkpoints

A URL names a place and nothing else: keys, accounts, regions and endpoints are the business of the operator of each
server, in the environment of that process, and no run can name them.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from protocol.base.errors import BadInputError

STORES = ("s3", "gs", "az")
"""Schemes of object stores that are reached over a network."""
MEMORY = "memory"
"""In the memory of one process: for tests, since no other process sees it."""
_SCHEMES = (*STORES, "file", MEMORY)
_URL = re.compile(r"(?P<scheme>[a-z0-9]+)://(?P<root>[A-Za-z0-9._-]*)(?P<path>(?:/[A-Za-z0-9._=+,~-]+)*)/?")
"""No user, password, port, query or percent sign: nothing that hides a secret, or a way around what is allowed."""


def is_url(place: str) -> bool:
    """Whether it is meant as a URL. A folder's path never holds two slashes behind a colon."""
    return "://" in place


def check_url(field: str, place: str) -> None:
    """Raises `BadInputError`, beginning with `field`, for a URL that names no place for checkpoints."""
    scheme = place.partition("://")[0]
    if scheme not in _SCHEMES:
        raise BadInputError(f"{field}: {scheme}:// is no place for checkpoints; s3://, gs://, az:// and file:// are")
    if _parts(place) is None:
        # Nothing of it is repeated: it may hold a key.
        wanted = "file:///FOLDER" if scheme == "file" else f"{scheme}://BUCKET/PREFIX"
        raise BadInputError(
            f"{field}: a URL has the form {wanted}, of letters, digits and . _ - = + , ~ only; keys, accounts and"
            " endpoints stand in the environment of each server"
        )


def _parts(place: str) -> tuple[str, str, tuple[str, ...]] | None:
    """(scheme, bucket, names below it), or None for what is no such URL."""
    found = _URL.fullmatch(place)
    if found is None or found["scheme"] not in _SCHEMES:
        return None
    names = tuple(found["path"].split("/")[1:])
    has_root = bool(found["root"].strip("."))
    if has_root == (found["scheme"] == "file") or any(not name.strip(".") for name in names):
        return None
    return None if found["scheme"] == "file" and not names else (found["scheme"], found["root"], names)


def local_folder(place: str) -> Path | None:
    """The folder of this computer that is meant by a path or a `file://` URL; None for a store elsewhere."""
    if not is_url(place):
        return Path(place)
    parts = _parts(place)
    return Path("/", *parts[2]) if parts is not None and parts[0] == "file" else None


def lies_below(place: str, allowed: str) -> bool:
    """Whether the URL of a store is another one, or is below it: the same bucket, and names that begin with its names.
    `file://` URLs are folders, which have links: see `local_folder`."""
    inner, outer = _parts(place), _parts(allowed)
    if inner is None or outer is None or "file" in (inner[0], outer[0]):
        return False
    return inner[:2] == outer[:2] and inner[2][: len(outer[2])] == outer[2]


def above(place: str, levels: int) -> str:
    """The place so many levels up: of `s3://b/run/step/manifest.json` two levels are `s3://b/run`."""
    if is_url(place):
        return place.rsplit("/", levels)[0]
    folder = PurePath(place)
    for _ in range(levels):
        folder = folder.parent
    return str(folder)

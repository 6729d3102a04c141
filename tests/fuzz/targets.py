"""What is fuzzed: every decoder of words that others wrote, with the errors that it may raise and seeds that it takes.

A target gets bytes and either returns or raises what its decoder promises; anything else is a find. Bytes that a key
protects are given to the decoder behind the key, since nobody without the key gets there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from node.compute.checkpoint import MANIFEST, CheckpointError, read_manifest, read_part
from node.links.notes import read_note
from node.links.punch.helper_frames import Credit, FrameReader, data_frame, order_frame
from node.links.router import natpmp, upnp
from protocol.base.errors import BadInputError, RemoteProtocolError
from protocol.link import stun
from protocol.link.codec import decode
from protocol.link.frames import FramingLimits, Hello
from protocol.link.incoming import Incoming
from protocol.link.relay import split_preamble
from protocol.link.signal import SIGNAL_LABEL, Correspondent, open_offer
from protocol.run.config_file import load_run, run_example
from protocol.schedule.text import read as read_schedule
from protocol.trust.handshake import Initiator, Responder
from protocol.trust.membership import (
    CREDENTIAL_LABEL,
    JoinLink,
    Trust,
    open_credential,
    open_revocations,
)
from protocol.trust.records import RecordReader
from tests.protocol.golden import GOLDEN
from tests.protocol.samples import ALICE, BOB, COORDINATOR, RUN_ID

CORPUS = Path(__file__).parent / "corpus"
_TENSOR_BYTES_MAX = 1 << 20
"""The smallest bound that lets the samples through: a find that takes more memory than this shows."""


@dataclass(frozen=True)
class Target:
    """One decoder."""

    name: str
    run: Callable[[bytes], Any]
    may_raise: tuple[type[BaseException], ...]
    seeds: Callable[[], list[bytes]]


def _golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / name).read_text())
    return found


def _lp(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


# ---- handshake, credentials, links -----------------------------------------------------------------------------------


def _options(identity: Any) -> dict[str, Any]:
    trust = Trust(RUN_ID, COORDINATOR.public_key, issuer=True)
    return {
        "identity": identity, "credential": b"", "run_id": RUN_ID,
        "admit": lambda key, credential: trust.admit(key, credential, 1_700_000_000.0),
    }  # fmt: skip


def _responder(data: bytes) -> None:
    Responder(**_options(BOB), entropy=b"\x0b" * 32).receive(data)


def _initiator(data: bytes) -> None:
    Initiator(**_options(ALICE), peer=BOB.node, entropy=b"\x0a" * 32).receive(data)


def _credential(body: bytes) -> None:
    signed = body + COORDINATOR.sign(CREDENTIAL_LABEL + body)
    for opened in (open_credential, open_revocations):
        try:
            opened(signed, COORDINATOR.public_key)
        except RemoteProtocolError:
            continue


def _link(data: bytes) -> None:
    JoinLink.parse(data.decode("utf-8", "replace"))


# ---- records, frames, messages ---------------------------------------------------------------------------------------


def _records(data: bytes) -> None:
    for _ in RecordReader(b"\x11" * 32).feed(data):
        pass


def _frames(data: bytes) -> None:
    """A sequence of frames: kind (1), length (2), content."""
    incoming = Incoming("server", "volunteer", FramingLimits(_TENSOR_BYTES_MAX, _TENSOR_BYTES_MAX), lambda *_: None)
    at = 0
    while at + 3 <= len(data):
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        incoming.take(data[at], data[at + 3 : end])
        at = end


def _frame_seeds() -> list[bytes]:
    messages = [bytes.fromhex(line.split()[1]) for line in (GOLDEN / "messages.txt").read_text().splitlines()]
    plain = [bytes((2,)) + len(one).to_bytes(2, "big") + one for one in messages]
    bulk = [bytes((4,)) + (4 + len(one)).to_bytes(2, "big") + bytes(4) + one for one in messages]
    return plain + bulk


def _message_seeds() -> list[bytes]:
    return [bytes.fromhex(line.split()[1]) for line in (GOLDEN / "messages.txt").read_text().splitlines()]


# ---- letters, notes, datagrams, routers ------------------------------------------------------------------------------


def _letter(body: bytes) -> None:
    expected = Correspondent(run_id=RUN_ID, generation=3, me=BOB.node, peer=ALICE.node)
    open_offer(body + ALICE.sign(SIGNAL_LABEL + body), expected)


def _helper(data: bytes) -> None:
    for daemon in (True, False):
        FrameReader(daemon=daemon).receive(data)


def _stun(data: bytes) -> None:
    stun.answer(data, "192.0.2.7", 9)
    stun.seen(data, bytes(12))


def _natpmp(data: bytes) -> None:
    for read in (natpmp.read_address, lambda answer: natpmp.read_mapping(answer, "tcp", 7)):
        try:
            read(data)
        except RemoteProtocolError:
            continue


def _upnp(data: bytes) -> None:
    place = upnp.Place(80, "/")
    for read in (
        lambda: upnp.read_location(data, "192.168.1.1"),
        lambda: upnp.read_description(data, "192.168.1.1", place),
        lambda: upnp.read_reply(500, data),
        lambda: upnp.read_address(data.decode("utf-8", "replace")),
    ):
        try:
            read()
        except (RemoteProtocolError, upnp.RefusedError):
            continue


def _upnp_seeds() -> list[bytes]:
    service = (
        "<service><serviceType>urn:schemas-upnp-org:service:WANIPConnection:1</serviceType><controlURL>/c</controlURL>"
    )
    return [
        b"HTTP/1.1 200 OK\r\nLOCATION: http://192.168.1.1:5000/root.xml\r\n\r\n",
        f"<root><URLBase>http://192.168.1.1/</URLBase>{service}</service></root>".encode(),
        b"<errorCode>718</errorCode>",
        b"<NewExternalIPAddress>203.0.113.7</NewExternalIPAddress>",
    ]


# ---- files -------------------------------------------------------------------------------------------------------


@cache
def _scratch() -> Path:
    """A folder in memory where there is one: files are written a hundred thousand times."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="br-fuzz-", dir=shared if shared.is_dir() else None))
    import atexit

    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _config(data: bytes) -> None:
    path = _scratch() / "RUN.toml"
    path.write_bytes(data)
    load_run(path)


def _manifest(data: bytes) -> None:
    (_scratch() / MANIFEST).write_bytes(data)
    read_manifest(_scratch())


def _part(data: bytes) -> None:
    path = _scratch() / "part.safetensors"
    path.write_bytes(data)
    read_part(path, {})


def _part_seeds() -> list[bytes]:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return [len(header).to_bytes(8, "little") + header + bytes(8)]


def _manifest_seeds() -> list[bytes]:
    return [
        b'{"step":3,"parts":[],"sum":"x"}',
        b'{"parts":[{"file":"../x","byte_count":1,"digest":"","stage":0,"shard":0}]}',
    ]


def _schedule(data: bytes) -> None:
    read_schedule(data.decode("utf-8", "replace"))


def _hex(file: str, *keys: str, cut: int = 0) -> list[bytes]:
    """Golden bytes by name, without the `cut` last ones (a signature)."""
    whole = [bytes.fromhex(value) for key, value in _golden(file).items() if key in keys]
    return [one[: len(one) - cut] for one in whole]


def _handshake_seeds() -> list[bytes]:
    return [_lp(message) for message in _hex("handshake.json", "m1", "m2", "m3")]


def _record_seeds() -> list[bytes]:
    vector = _golden("records.json")
    return [bytes.fromhex(vector["header"] + "".join(vector["records"]))]


def _stun_seeds() -> list[bytes]:
    question = stun.question(bytes(12))
    made = stun.answer(question, "192.0.2.1", 7)
    assert made is not None
    return [question, made[0]]


def _signed(body: bytes) -> bytes:
    """A join link whose invite holds `body`, signed by the key that it names and with the right check."""
    signed = body + COORDINATOR.sign(CREDENTIAL_LABEL + body)
    return str(JoinLink(("127.0.0.1:7",), signed)).encode()


_PEER = (RemoteProtocolError,)
_RUN = b'name = "x"\n[model]\nlayers = 2\n'
TARGETS: tuple[Target, ...] = (
    Target("handshake_responder", _responder, _PEER, _handshake_seeds),
    Target("handshake_initiator", _initiator, _PEER, _handshake_seeds),
    Target(
        "credential", _credential, (), lambda: _hex("membership.json", "invite", "membership", "revocations", cut=64)
    ),
    Target("join_link", _link, (BadInputError,), lambda: [_golden("membership.json")["join_link"].encode()]),
    Target(
        "join_link_invite", lambda data: _link(_signed(data)), (BadInputError,),
        lambda: _hex("membership.json", "invite", cut=64),
    ),
    Target("records", _records, _PEER, _record_seeds),
    Target("hello", Hello.decode, _PEER, lambda: [Hello(1, 1 << 20, b"\x07" * 16).encode(), Hello(0, 1).encode()]),
    Target("frames", _frames, _PEER, _frame_seeds),
    Target("codec", decode, _PEER, _message_seeds),
    Target("signal", _letter, _PEER, lambda: _hex("signal.json", "offer", "answer", cut=64)),
    Target("notes", read_note, _PEER, lambda: [msgspec.msgpack.encode(["knock", 1, ["192.0.2.1:7"]])]),
    Target("relay", split_preamble, _PEER, lambda: [b"brrelay1" + bytes(16)]),
    Target("helper_frames", _helper, _PEER, lambda: [order_frame(1, Credit(7)), data_frame(1, bytes(9))]),
    Target("stun", _stun, (), _stun_seeds),
    Target("natpmp", _natpmp, (), lambda: [bytes((0, 128, 0, 0)) + bytes(8), bytes((0, 130, 0, 0)) + bytes(12)]),
    Target("upnp", _upnp, (), _upnp_seeds),
    Target("config", _config, (BadInputError,), lambda: [run_example().encode()[:4000], _RUN]),
    Target("schedule", _schedule, (BadInputError,), lambda: [b"# barnraise schedule 1\nnode 0: 0F0 0B0\n"]),
    Target("manifest", _manifest, (CheckpointError,), _manifest_seeds),
    Target("checkpoint_part", _part, (CheckpointError,), _part_seeds),
)  # fmt: skip


def seeds_of(target: Target) -> list[bytes]:
    """The target's own, and what was found before: a line of hexadecimal digits each in `corpus/NAME`."""
    found = CORPUS / target.name
    lines = found.read_text().split() if found.exists() else []
    return target.seeds() + [bytes.fromhex(line) for line in lines]

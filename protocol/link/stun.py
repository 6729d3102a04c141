"""The one question of STUN that tells a node how a gateway rewrites it: "from where do you see me?" (RFC 8489).

A request may ask that the answer come from another port (CHANGE-REQUEST, RFC 5780): whether it arrives tells if the
gateway lets strangers through to a mapping. Nothing else of STUN is here: no credentials, no indications.
"""

from __future__ import annotations

import ipaddress
import struct

_MAGIC = 0x2112A442
_BINDING_REQUEST = 0x0001
_BINDING_ANSWER = 0x0101
_MAPPED_ADDRESS = 0x0001
_CHANGE_REQUEST = 0x0003
_XOR_MAPPED_ADDRESS = 0x0020
_PADDING = 0x0026
_CHANGE_PORT = 0x00000002
_HEADER = struct.Struct("!HHI12s")
_ATTRIBUTE = struct.Struct("!HH")
TRANSACTION_BYTES = 12
DATAGRAM_BYTES_MAX = 548
"""A question or an answer of ours; longer is none (RFC 8489 section 6.1)."""
ANSWER_BYTES_MAX = 44
"""An answer with an IPv6 address. Our own questions are padded to it, so that no answer is longer than its question."""


def question(transaction: bytes, *, other_port: bool = False) -> bytes:
    """A binding request; `other_port` asks for the answer from another port. `transaction`: 12 random bytes."""
    assert len(transaction) == TRANSACTION_BYTES
    content = _ATTRIBUTE.pack(_CHANGE_REQUEST, 4) + struct.pack("!I", _CHANGE_PORT) if other_port else b""
    padding = ANSWER_BYTES_MAX - _HEADER.size - len(content) - _ATTRIBUTE.size
    content += _ATTRIBUTE.pack(_PADDING, padding) + bytes(padding)
    return _HEADER.pack(_BINDING_REQUEST, len(content), _MAGIC, transaction) + content


def answer(data: bytes, host: str, port: int) -> tuple[bytes, bool] | None:
    """The answer to a question that came from (host, port), and whether it is to leave from the other port.

    None for everything that is no question.
    """
    opened = _open(data, _BINDING_REQUEST)
    if opened is None:
        return None
    transaction, attributes = opened
    change = attributes.get(_CHANGE_REQUEST, bytes(4))
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    family = 1 if address.version == 4 else 2
    mask = struct.pack("!I", _MAGIC) + transaction
    hidden = bytes(a ^ b for a, b in zip(address.packed, mask, strict=False))
    value = struct.pack("!BBH", 0, family, port ^ (_MAGIC >> 16)) + hidden
    content = _ATTRIBUTE.pack(_XOR_MAPPED_ADDRESS, len(value)) + value
    other = len(change) == 4 and bool(int.from_bytes(change, "big") & _CHANGE_PORT)
    return _HEADER.pack(_BINDING_ANSWER, len(content), _MAGIC, transaction) + content, other


def seen(data: bytes, transaction: bytes) -> tuple[str, int] | None:
    """(host, port) that the answer to our question says; None for everything that is not that answer."""
    opened = _open(data, _BINDING_ANSWER)
    if opened is None or opened[0] != transaction:
        return None
    attributes = opened[1]
    value = attributes.get(_XOR_MAPPED_ADDRESS)
    mask = bytes(16)
    if value is not None:
        mask = struct.pack("!I", _MAGIC) + transaction
    else:
        value = attributes.get(_MAPPED_ADDRESS)  # of servers older than 2008
    if value is None or len(value) not in (8, 20) or value[1] != (1 if len(value) == 8 else 2):
        return None
    port = int.from_bytes(value[2:4], "big") ^ int.from_bytes(mask[:2], "big")
    host = ipaddress.ip_address(bytes(a ^ b for a, b in zip(value[4:], mask, strict=False)))
    return str(host), port


def _open(data: bytes, kind: int) -> tuple[bytes, dict[int, bytes]] | None:
    """(transaction, attributes) of a message of this kind, the first of each attribute; None if it is none."""
    if not _HEADER.size <= len(data) <= DATAGRAM_BYTES_MAX:
        return None
    its_kind, length, magic, transaction = _HEADER.unpack_from(data)
    if its_kind != kind or magic != _MAGIC or length % 4 or _HEADER.size + length != len(data):
        return None
    attributes: dict[int, bytes] = {}
    at = _HEADER.size
    while at < len(data):
        if at + _ATTRIBUTE.size > len(data):
            return None
        name, size = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        if at + size > len(data):
            return None
        attributes.setdefault(name, data[at : at + size])
        at += (size + 3) // 4 * 4
    return transaction, attributes

"""Messages survive the wire; nothing else does, and what is refused costs next to nothing (S9, S13)."""

from __future__ import annotations

import itertools
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base.errors import LocalProtocolError, RemoteProtocolError
from protocol.base.forms import byte_bounds
from protocol.base.ids import ContributionId, NodeId, TaskId, TensorRef
from protocol.base.limits import (
    CONTRIBUTIONS_MAX,
    MESSAGE_BYTES_MAX,
    NUMBER_MAX,
    REJECT_REASONS,
    REPORT_COUNTERS,
    TASKS_MAX,
    TEXT_MAX,
)
from protocol.kinds import MAY_SEND, MESSAGES, ROLES
from protocol.link.codec import check_allowed, check_tensors, decode, encode, traffic_kind
from protocol.messages import (
    Bye,
    Commit,
    Freeze,
    Held,
    Lease,
    Message,
    NodeReport,
    PartialNorm,
    Ping,
    Pong,
    StepReport,
    Welcome,
)
from tests.protocol.samples import ALICE, sample, samples

_KINDS = {kind.__name__: kind for kind in MESSAGES}


def _raw(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def _refusal(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(data)
    assert caught.value.reason in REJECT_REASONS
    return caught.value.reason


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.msgpack.decode(encode(message))
    return plain


@pytest.mark.parametrize("message", samples(), ids=lambda message: type(message).__name__)
def test_round_trip(message: Message) -> None:
    """Every kind comes back equal, and encodes to the same bytes again."""
    assert decode(encode(message)) == message
    assert encode(decode(encode(message))) == encode(message)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_fields_are_exact(kind: type[Message]) -> None:
    """An unknown, a missing, a doubled or a wrongly typed field is refused in every kind."""
    plain = _plain(sample(kind))
    assert _refusal(_raw(**plain, unknown=1)) == "decode"
    for name in plain:
        assert _refusal(_raw(**{key: value for key, value in plain.items() if key != name})) == "decode"
        assert _refusal(_raw(**plain | {name: {"a": b"wrong"}})) == "decode"
        doubled = bytearray(encode(sample(kind)))
        if doubled[0] == 0xDE:  # a map of more than 15 fields: two bytes of count
            doubled[2] += 1
        else:
            assert doubled[0] & 0xF0 == 0x80
            doubled[0] += 1
        assert _refusal(bytes(doubled) + msgspec.msgpack.encode(name) + msgspec.msgpack.encode(plain[name])) == "decode"


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_truncations_and_extensions(kind: type[Message]) -> None:
    """No part of a message and no message with bytes behind it is a message."""
    data = encode(sample(kind))
    step = max(1, len(data) // 200)
    for end in range(0, len(data), step):
        assert _refusal(data[:end]) == "decode"
    assert _refusal(data + b"\xc0") == "decode"


def test_one_form_only() -> None:
    """Longer forms of numbers and texts, other orders of fields, and left-out defaults are refused."""
    data = encode(Pong(number=7))
    assert data.endswith(b"\x07")
    for longer in (b"\xcc\x07", b"\xcd\0\x07", b"\xd0\x07", b"\xd3" + bytes(7) + b"\x07"):
        assert _refusal(data[:-1] + longer) == "decode"
    assert _refusal(_raw(number=7, type="Pong")) == "decode"
    lease = _plain(sample(Lease))
    lease["tasks"] = [task[:4] for task in lease["tasks"]]  # segment and slice have defaults
    assert _refusal(_raw(**lease)) == "decode"


def test_whole_numbers_in_fields_of_floats() -> None:
    """We may write 1 where a float is meant: it leaves as 1.0, and only as that it is accepted."""
    message = msgspec.structs.replace(sample(Commit), clip_factor=1)
    arrived = decode(encode(message))
    assert isinstance(arrived, Commit) and arrived == message and type(arrived.clip_factor) is float
    assert _refusal(msgspec.msgpack.encode(message)) == "decode"


def test_bounds_of_fields() -> None:
    """Numbers, texts, byte strings and lists have their bounds; just inside is fine, just outside is refused."""
    assert decode(encode(Ping(number=NUMBER_MAX))) == Ping(number=NUMBER_MAX)
    assert _refusal(_raw(type="Pong", number=NUMBER_MAX + 1)) == "decode"
    assert _refusal(_raw(type="Pong", number=-2)) == "decode"
    assert decode(_raw(type="Bye", reason="x" * TEXT_MAX)) == Bye(reason="x" * TEXT_MAX)
    assert _refusal(_raw(type="Bye", reason="x" * (TEXT_MAX + 1))) == "size"
    welcome = _plain(sample(Welcome))
    assert _refusal(_raw(**welcome | {"membership": bytes(2049)})) == "size"
    report = _plain(sample(NodeReport))
    assert _refusal(_raw(**report | {"counters": {"unknown": 1.0}})) == "decode"
    decode(_raw(**report | {"counters": dict.fromkeys(REPORT_COUNTERS, 1.0)}))
    tasks = tuple(TaskId(1, number, 0, "F") for number in range(TASKS_MAX + 1))
    held = Held(ledger_generation=1, kind="input", tasks=tasks[:-1], complete=True)
    assert decode(encode(held)) == held
    assert _refusal(msgspec.msgpack.encode(msgspec.structs.replace(held, tasks=tasks))) == "size"
    contributions = tuple(ContributionId(ALICE.node, NUMBER_MAX, number) for number in range(CONTRIBUTIONS_MAX))
    freeze = Freeze(ledger_generation=1, step=1, contributions=contributions)
    assert decode(encode(freeze)) == freeze
    assert _refusal(bytes(MESSAGE_BYTES_MAX + 1)) == "size"


def test_node_ids_have_their_form() -> None:
    """A name that could be a path or anything else than a node id is refused wherever one is meant."""
    for bad in ("", "../../etc/passwd", ALICE.node.upper(), ALICE.node + "\n", ALICE.node[:-1]):
        assert _refusal(_raw(**_plain(sample(Lease)) | {"front": bad})) == "decode"
        freeze = Freeze(ledger_generation=1, step=1, contributions=(ContributionId(NodeId(bad), 1, 1),))
        assert _refusal(msgspec.msgpack.encode(freeze)) == "decode"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(bad: float) -> None:
    """NaN and infinity are refused, but for the results of a diverged step, which the ledgers must hear of."""
    assert _refusal(msgspec.msgpack.encode(msgspec.structs.replace(sample(Commit), clip_factor=bad))) == "not_finite"
    assert _refusal(msgspec.msgpack.encode(msgspec.structs.replace(sample(StepReport), duration_s=bad))) == "not_finite"
    report = _plain(sample(NodeReport)) | {"counters": {REPORT_COUNTERS[0]: bad}}
    assert _refusal(_raw(**report)) == "not_finite"
    diverged = msgspec.structs.replace(sample(PartialNorm), square_norm=bad)
    assert encode(decode(encode(diverged))) == encode(diverged)


def test_our_own_mistakes() -> None:
    """A message that peers would refuse is our bug, found before it leaves; sentences for people are cut."""
    for bad in (
        Ping(number=-5),
        Ping(number="five"),  # type: ignore[arg-type]
        msgspec.structs.replace(sample(Commit), clip_factor=float("nan")),
        msgspec.structs.replace(sample(Lease), front=NodeId("s1")),
    ):
        with pytest.raises(LocalProtocolError):
            encode(bad)
    assert decode(encode(Bye(reason="x" * 9999))) == Bye(reason="x" * TEXT_MAX)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_role_table(kind: type[Message]) -> None:
    """Of all pairs of roles, exactly those of the table may exchange a kind; strangers may exchange nothing (S13)."""
    for sender, receiver in itertools.product((*ROLES, "stranger", ""), repeat=2):
        if (sender, receiver) in MAY_SEND[kind]:
            check_allowed(kind, sender, receiver)
        else:
            with pytest.raises(RemoteProtocolError) as caught:
                check_allowed(kind, sender, receiver)
            assert caught.value.reason == "role"


def test_volunteers_speak_with_servers_and_the_coordinator_only() -> None:
    """No kind lets a volunteer reach another volunteer, but the three of every link."""
    everybody = {kind.__name__ for kind in MESSAGES if ("volunteer", "volunteer") in MAY_SEND[kind]}
    assert everybody == {"Ping", "Pong", "Bye"}


def test_tensor_references() -> None:
    """Shapes, forms and byte counts must agree before anybody believes them."""
    good = (TensorRef(0, (2, 3), "fp32", 24), TensorRef(1, (5,), "bf16", 10))
    assert check_tensors(good, 24) == 34
    for bad, reason in (
        (TensorRef(1, (2, 3), "fp32", 24), "shape"),
        (TensorRef(0, (2, 3), "fp32", 23), "shape"),
        (TensorRef(0, (2, 3), "bf16", 24), "shape"),
        (TensorRef(0, (0,), "fp32", 0), "shape"),
        (TensorRef(0, (7,), "fp32", 28), "size"),
        (TensorRef(0, (2**62, 2**62), "fp32", 2**63 - 1), "shape"),
    ):
        with pytest.raises(RemoteProtocolError) as caught:
            check_tensors((bad,), 24)
        assert caught.value.reason == reason


def test_packed_integers_are_bounded_by_their_number_too() -> None:
    """Zeros take 5 bits for 64 of them: within the bytes of a small tensor a message would claim to hold 102 times as
    many values, in one tensor or in many, and who looks at them would pay for each."""

    def zeros(number: int, count: int) -> TensorRef:
        return TensorRef(number, (count,), "gi", byte_bounds((count,), "gi")[0])

    bytes_max, most = 1 << 20, 1 << 20
    assert check_tensors(tuple(zeros(number, most) for number in range(4)), bytes_max, most) > 0
    for bad in ((zeros(0, most + 1),), tuple(zeros(number, most) for number in range(5)), (zeros(0, 100 * most),)):
        assert all(tensor.byte_count <= bytes_max for tensor in bad)
        with pytest.raises(RemoteProtocolError, match="size"):
            check_tensors(bad, bytes_max, most)


def test_traffic_kinds() -> None:
    """Every message counts under one kind of the metric; those without tensors are control, and no others."""
    kinds = {type(message).__name__: traffic_kind(message) for message in samples()}
    assert kinds["Activation"] == kinds["Lease"] == "activation" and kinds["Contribute"] == "gradient"
    assert kinds["Parameters"] == "weights" and kinds["Labels"] == "data" and kinds["Freeze"] == "control"
    assert kinds["MeasureData"] == "measuring"
    assert [m for m in samples() if getattr(m, "tensors", ()) and traffic_kind(m) == "control"] == []
    backward = msgspec.structs.replace(sample(Lease), tasks=(TaskId(1, 1, 1, "B"),))
    assert traffic_kind(backward) == "gradient"


def _bombs() -> dict[str, bytes]:
    held = encode(Held(ledger_generation=1, kind="input", tasks=(), complete=True))
    place = held.index(b"\xa5tasks") + 6
    size = MESSAGE_BYTES_MAX - len(held) - 16
    head = held[:place]
    return {
        "nested arrays": head + b"\xdd\xff\xff\xff\xff" * (size // 5),
        "nested small arrays": head + b"\x91" * size,
        "announced array": head + b"\xdd\xff\xff\xff\xff\x96",
        "array of empty arrays": head + b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size,
        "array of nil": head + b"\xdd" + size.to_bytes(4, "big") + b"\xc0" * size,
        "announced text": b"\x82\xa4type\xdb\xff\xff\xff\xff",
        "announced bytes": b"\x82\xa4type\xc6\xff\xff\xff\xff",
        "announced map": b"\xdf\xff\xff\xff\xff\xa4type",
        "nested maps": b"\x81\xa4type" * (size // 6),
        "map of nothing": b"\xdf" + (size // 2).to_bytes(4, "big") + b"\xa0\xc0" * (size // 2),
        "extension": b"\x81\xa4type\xc9" + size.to_bytes(4, "big") + b"\x01" + bytes(size),
        "only arrays": b"\xdd\xff\xff\xff\xff" * (size // 5),
        "long counters": _raw(**_plain(sample(NodeReport)) | {"counters": {f"{n:x}": 1.0 for n in range(40_000)}}),
    }


@pytest.mark.parametrize("name", list(_bombs()))
def test_bombs(name: str) -> None:
    """Nested, announced and endless structures are refused in memory of at most four times their length (S9)."""
    bomb = _bombs()[name]
    assert len(bomb) <= MESSAGE_BYTES_MAX
    _refusal(bomb)  # once outside the measurement, for what is made only once
    tracemalloc.start()
    with suppress(RemoteProtocolError):
        decode(bomb)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    bound = 4 if name != "long counters" else 16  # honest structure up to its last byte; see protocol/README.md
    assert peak_bytes < max(4096, bound * len(bomb)), f"{peak_bytes} bytes for {len(bomb)}"


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    """Random bytes raise `RemoteProtocolError` and nothing else."""
    _refusal(data)


@given(st.sampled_from(sorted(_KINDS)), st.data())
def test_mutated_messages(name: str, data: st.DataObject) -> None:
    """A message with some bytes changed is refused, or is another honest message in its one form."""
    changed = bytearray(encode(sample(_KINDS[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode(bytes(changed))
    except RemoteProtocolError:
        return
    assert encode(message) == bytes(changed)


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(_KINDS)), st.data())
def test_fields_of_any_type(name: str, data: st.DataObject) -> None:
    """Any value in any field of any kind gives that message back in the same bytes, or a refusal."""
    plain = _plain(sample(_KINDS[name]))
    field = data.draw(st.sampled_from(sorted(plain)))
    raw = _raw(**plain | {field: data.draw(_json)})
    try:
        message = decode(raw)
    except RemoteProtocolError:
        return
    assert encode(message) == raw


@pytest.mark.slow
def test_many_bad_messages() -> None:
    """300,000 mutated messages of all kinds: each is refused, or is honest in its one form (seed 4)."""
    rng = random.Random(4)
    honest = [encode(message) for message in samples()]
    for _ in range(300_000):
        changed = bytearray(rng.choice(honest))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(changed))
            match rng.randrange(4):
                case 0:
                    changed[place] = rng.randrange(256)
                case 1:
                    changed[place] ^= 1 << rng.randrange(8)
                case 2:
                    del changed[place : place + rng.randrange(1, 9)]
                case _:
                    changed[place:place] = rng.choice(honest)[: rng.randrange(40)]
            if not changed:
                changed = bytearray(b"\xc0")
        with suppress(RemoteProtocolError):
            assert encode(decode(bytes(changed))) == bytes(changed)


def test_what_a_server_says_is_wrong_is_cut_like_every_sentence() -> None:
    """Names of files make it long: it once ended the server that wanted to tell of a checkpoint it could not write."""
    report = decode(encode(NodeReport(state="training", waiting_for="w" * 999, alert="a" * 999, counters={})))
    assert isinstance(report, NodeReport)
    assert len(report.alert) == len(report.waiting_for) == TEXT_MAX

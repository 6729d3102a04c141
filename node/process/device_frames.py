"""Frames between a daemon and the process that has its device: jobs with their bytes one way, outcomes the other.

A frame is two lengths (header, body), a msgpack header, and the bodies of its tensors one behind the other. Both ends
are ours and of one installation; still everything is decoded into its type, never built by name from outside.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from node.machine import jobs
from node.process.store import Buffer
from protocol.base.ids import TensorRef

_LENGTHS = struct.Struct(">IQ")
_WRITE_BYTES = 1 << 20
DEVICE_IS_LOST = 3
"""The exit status of a device's process whose device does nothing more for it."""
JOB_TYPES: Mapping[str, type] = {kind.__name__: kind for kind in jobs.DEVICE_JOBS}
RESULTS: Mapping[str, Any] = {
    "SetUpDevice": int,
    "Forward": TensorRef | None,
    "Backward": TensorRef | None,
    "RouteEnd": tuple[float, TensorRef | None],
    "SegmentEnd": tuple[float, TensorRef | None],
    "Evaluate": TensorRef | float,
    "TakeGradient": tuple[TensorRef, ...],
    "Compare": float,
    "TakeResidual": tuple[float, ...],
    "TakeWeights": tuple[TensorRef, ...],
}
"""What a job's result is; None where nothing stands here."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame of the device's process: it is there, and its libraries are loaded."""

    pid: int
    label: str = ""
    """What the device is, for people."""
    is_accelerator: bool = False
    gpu: str = ""
    """How NVIDIA's driver calls it; empty: it is none of that driver's."""


@dataclass(frozen=True, slots=True)
class SetShare:
    """From now on the device works so much of the time, above 0 and at most 1."""

    share: float


@dataclass(frozen=True, slots=True)
class Done:
    """What an outcome says beside its tensors; of which job follows from the order."""

    reason: str | None
    """None: it ended well."""
    result: Any
    kind: str
    seconds: float
    codec_s: float
    refs: tuple[TensorRef, ...]


class _JobHeader(msgspec.Struct, array_like=True):
    name: str
    job: msgspec.Raw
    keys: tuple[int, ...]
    byte_counts: tuple[int, ...]


class _DoneHeader(msgspec.Struct, array_like=True):
    reason: str | None
    result: msgspec.Raw
    kind: str
    seconds: float
    codec_s: float
    refs: tuple[TensorRef, ...]
    byte_counts: tuple[int, ...]


def write_job(stream: BinaryIO, job: Any, buffers: Mapping[int, Buffer]) -> None:
    """A job with the bytes of its references."""
    raw = msgspec.Raw(msgspec.msgpack.encode(job))
    bodies = [memoryview(buffer).cast("B") for buffer in buffers.values()]
    header = _JobHeader(type(job).__name__, raw, tuple(buffers), tuple(body.nbytes for body in bodies))
    _write(stream, msgspec.msgpack.encode(header), bodies)


def write_frame(stream: BinaryIO, frame: Hello | SetShare) -> None:
    header = _JobHeader(type(frame).__name__, msgspec.Raw(msgspec.msgpack.encode(frame)), (), ())
    _write(stream, msgspec.msgpack.encode(header), ())


def read_job(stream: BinaryIO) -> tuple[Any, dict[int, Buffer]] | SetShare | Hello | None:
    """The next job with its bytes, or an order; None at the end of the stream."""
    frame = _read(stream)
    if frame is None:
        return None
    header = msgspec.msgpack.decode(frame[0], type=_JobHeader)
    if header.name == "SetShare":
        return msgspec.msgpack.decode(header.job, type=SetShare)
    if header.name == "Hello":
        return msgspec.msgpack.decode(header.job, type=Hello)
    job: Any = msgspec.msgpack.decode(header.job, type=JOB_TYPES[header.name])
    return job, dict(zip(header.keys, _cut(frame[1], header.byte_counts), strict=True))


def write_outcome(stream: BinaryIO, outcome: Any) -> None:
    """What became of a job: `node.compute.lane.Outcome`."""
    reason = getattr(outcome.fact, "reason", None)
    result = None if reason is not None else outcome.fact.result
    bodies = [memoryview(buffer).cast("B") for _, buffer in outcome.tensors]
    header = _DoneHeader(
        reason,
        msgspec.Raw(msgspec.msgpack.encode(result)),
        outcome.kind,
        outcome.seconds,
        outcome.codec_s,
        tuple(ref for ref, _ in outcome.tensors),
        tuple(body.nbytes for body in bodies),
    )
    _write(stream, msgspec.msgpack.encode(header), bodies)


def read_outcome(stream: BinaryIO, oldest: Callable[[], Any]) -> tuple[Done, list[Buffer]] | None:
    """The next outcome; None at the end of the stream. `oldest`: the job that it is of, the oldest without one."""
    frame = _read(stream)
    if frame is None:
        return None
    header = msgspec.msgpack.decode(frame[0], type=_DoneHeader)
    kind = RESULTS.get(type(oldest()).__name__) if header.reason is None else None
    result = msgspec.msgpack.decode(header.result, type=kind) if kind is not None else None
    done = Done(header.reason, result, header.kind, header.seconds, header.codec_s, header.refs)
    return done, _cut(frame[1], header.byte_counts)


def _write(stream: BinaryIO, header: bytes, bodies: Sequence[memoryview]) -> None:
    stream.write(_LENGTHS.pack(len(header), sum(body.nbytes for body in bodies)) + header)
    for body in bodies:
        for begin in range(0, body.nbytes, _WRITE_BYTES):
            stream.write(body[begin : begin + _WRITE_BYTES])
    stream.flush()


def _read(stream: BinaryIO) -> tuple[bytes, bytearray] | None:
    lengths = _fill(stream, bytearray(_LENGTHS.size))
    if lengths is None:
        return None
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    header, body = _fill(stream, bytearray(header_bytes)), _fill(stream, bytearray(body_bytes))
    return None if header is None or body is None else (bytes(header), body)


def _fill(stream: BinaryIO, room: bytearray) -> bytearray | None:
    view = memoryview(room)
    while view.nbytes:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            return None
        view = view[count:]
    return room


def _cut(body: bytearray, byte_counts: Iterable[int]) -> list[Buffer]:
    """The tensors of a body, each a view into it."""
    parts: list[Buffer] = []
    view, begin = memoryview(body), 0
    for count in byte_counts:
        parts.append(view[begin : begin + count])
        begin += count
    return parts

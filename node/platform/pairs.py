"""Sockets between a daemon and a helper process that share it: handed down at the start, and handed back later.

POSIX only (socket pairs of the family UNIX, inherited by number, and sockets passed through them). Where that is not
to be had, `CAN_PASS_SOCKETS` is false, and a node opens no way by UDP: it dials by TCP and is relayed.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import trio

CAN_PASS_SOCKETS = os.name == "posix" and hasattr(socket, "AF_UNIX") and hasattr(socket, "send_fds")
RECEIVED_SOCKETS_MAX = 4


@dataclass(frozen=True)
class HelperSockets:
    """Two pairs: `frames` is a stream, `sockets` carries datagrams that bring sockets with them."""

    frames: socket.socket
    sockets: socket.socket
    their_frames: socket.socket
    their_sockets: socket.socket

    @classmethod
    def open(cls) -> HelperSockets:
        frames, their_frames = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        sockets, their_sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        sockets.setblocking(False)
        return cls(frames, sockets, their_frames, their_sockets)

    @property
    def their_numbers(self) -> tuple[int, int]:
        return self.their_frames.fileno(), self.their_sockets.fileno()

    async def start(self, command: Sequence[str]) -> trio.Process:
        """The child inherits its two ends; ours of them are closed."""
        process = await trio.lowlevel.open_process(command, stdin=subprocess.DEVNULL, pass_fds=self.their_numbers)
        self.their_frames.close()
        self.their_sockets.close()
        return process

    def close(self) -> None:
        for handle in (self.frames, self.their_frames, self.sockets, self.their_sockets):
            handle.close()


def receive_sockets(handle: socket.socket, byte_count: int) -> tuple[bytes, list[int]]:
    """A datagram of at most so many bytes, and the numbers of the sockets that came with it. May raise `OSError`."""
    data, numbers, _, _ = socket.recv_fds(handle, byte_count, RECEIVED_SOCKETS_MAX)
    return data, numbers


def pass_socket(handle: socket.socket, data: bytes, number: int) -> None:
    """Sends a datagram, and the socket with that number goes along."""
    socket.send_fds(handle, [data], [number])

"""Words to the system's service manager: ready, what is done now, and that the daemon is alive (sd_notify)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(*lines: str) -> None:
    """Tells the manager that started us, where there is one that wants to hear (systemd, `Type=notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.sendall("\n".join(lines).encode())

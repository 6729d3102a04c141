"""Where a daemon's `/metrics` answers: on loopback unless told otherwise, at a port that is kept and written down.

The port lies in `metrics.json` of the state folder, in the form that Prometheus reads (`file_sd_configs`), so a
machine's own Prometheus finds every daemon by its folder. The file stays after a crash: a daemon that should run and
does not is what `up == 0` is for. A daemon that ends in peace takes its file along.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from protocol.base.errors import BadInputError
from protocol.drive.addresses import ANY_HOST, OFF, host_port, is_loopback
from protocol.drive.durable import DISK_TROUBLE, replace_durably
from protocol.drive.metrics import Metrics

PORT_FILE = "metrics.json"
LOOPBACK = "127.0.0.1"
COORDINATOR_PORTS = (8471,)
NODE_PORTS = range(8472, 8572)
"""Tried in order before any free port is taken: a machine with a hundred nodes is a test."""


@dataclass(frozen=True)
class Scrape:
    """Where `/metrics` of this process answers."""

    host: str
    port: int
    file: Path

    @property
    def target(self) -> str:
        """HOST:PORT to ask on this machine."""
        return host_port(LOOPBACK if self.host in ("0.0.0.0", "::") else self.host, self.port)  # noqa: S104 - not bound

    @property
    def url(self) -> str:
        return f"http://{self.target}/metrics"

    def counters(self) -> dict[str, float]:
        """What a node's report says of it, so that the coordinator can tell Prometheus (`/api/sd`)."""
        name = "metrics_loopback_port" if is_loopback(self.host) else "metrics_port"
        return {name: float(self.port)}

    def close(self) -> None:
        """The daemon ends in peace: nobody shall look for it."""
        with contextlib.suppress(OSError):
            self.file.unlink()


def open_metrics(
    metrics: Metrics,
    folder: Path,
    asked: tuple[str, int] | None,
    ports: Sequence[int],
    labels: Mapping[str, str],
) -> Scrape | None:
    """Serves `/metrics` and writes the port file into `folder`, which exists. A disk that is full or fails costs the
    file, with a warning, and nothing else: who ends with `BadInputError` for it is not begun again.

    Args:
        asked: (host, port) of the command line; `OFF`; None: loopback, at the port of the last time, else the first
            free one of `ports`, else any.
        labels: what the port file says of this daemon, such as its role.

    Raises:
        BadInputError: the address that was asked for cannot be used, or nothing may be written into the folder.
    """
    file = folder / PORT_FILE
    if asked == OFF:
        with contextlib.suppress(OSError):
            file.unlink()
        return None
    if asked is not None:
        host = "0.0.0.0" if asked[0] == ANY_HOST else asked[0]  # noqa: S104 - the operator's wish
        kept = _port_of(file) if asked[1] == 0 else 0
        port = _first_free(metrics, host, (*((kept,) if kept else ()), asked[1]), "--metrics")
    else:
        host = LOOPBACK
        kept = _port_of(file)
        port = _first_free(metrics, host, (*((kept,) if kept else ()), *ports, 0), "--metrics")
    scrape = Scrape(host, port, file)
    text = json.dumps([{"targets": [scrape.target], "labels": dict(labels)}], indent=1) + "\n"
    try:
        replace_durably(file, text.encode())
    except OSError as error:
        if error.errno in DISK_TROUBLE:
            structlog.get_logger("metrics").warning("the port file is not written", file=str(file), reason=str(error))
            return scrape
        raise BadInputError(f"{file}: cannot be written: {error.strerror}") from error
    return scrape


def _first_free(metrics: Metrics, host: str, ports: Sequence[int], option: str) -> int:
    for port in ports:
        try:
            return metrics.serve(host, port)
        except OSError as error:
            last = error
    raise BadInputError(f"{option} {host_port(host, ports[-1])}: {last.strerror or last}") from last


def _port_of(file: Path) -> int:
    """The port of the last time, or 0; whoever may write to the state folder could change more than this."""
    try:
        found = json.loads(file.read_text())[0]["targets"][0]
        port = int(str(found).rpartition(":")[2])
    except (OSError, ValueError, LookupError, TypeError):
        return 0
    return port if 0 < port < 65536 else 0

"""`/metrics` over HTTP, for a handful of scrapers: a caller that says nothing is cut off and holds no thread."""

from __future__ import annotations

import socket
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

CALLERS_MAX = 16
"""Answered at the same time, a thread each; Prometheus keeps one connection, and few people look themselves."""
SILENT_S = 5.0
"""To send a request of some hundred bytes, or to take any part of the answer."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each scrape."""


class _Server(ThreadingWSGIServer):
    """Closes the connection of one caller too many at once, instead of keeping it waiting."""

    address_family = socket.AF_INET

    def __init__(self, *args: Any, **options: Any) -> None:
        self._room = threading.BoundedSemaphore(CALLERS_MAX)
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away in the middle is no matter for the log."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> int:
    """Answers from threads of its own until the process ends; returns the port. Raises `OSError`."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    server = (_Server6 if family == socket.AF_INET6 else _Server)((host, port), _Handler)
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)

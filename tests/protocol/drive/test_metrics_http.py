"""`/metrics` stays answerable beside callers that say nothing, and their threads end."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge

from protocol.drive import metrics_http
from protocol.drive.metrics_http import CALLERS_MAX, serve_metrics


@pytest.mark.slow
def test_silent_callers_hold_no_thread_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as may be answered at once: those too many are closed at once, the others in time."""
    monkeypatch.setattr(metrics_http._Handler, "timeout", 0.5)
    registry = CollectorRegistry()
    Gauge("speed", "m/s", registry=registry).set(3)
    before = threading.active_count()
    port = serve_metrics(registry, "127.0.0.1", 0)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * CALLERS_MAX)]
    try:
        for caller in silent:
            caller.settimeout(20)
            assert caller.recv(1) == b""  # closed by the other side, at once or when its patience is over
        assert threading.active_count() <= before + 1 + CALLERS_MAX
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert b"speed 3.0" in answer.read()
    finally:
        for caller in silent:
            caller.close()

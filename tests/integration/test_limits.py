"""The owner's limits on every way, by the counters of a network that knows nothing of ours."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.benchmarks.limits import DIRECTIONS, WAYS, measure
from tests.integration.namespaces import alone, why_not

WAN = str(Path(__file__).parents[2] / "deploy" / "wan")
LOCK = Path("/tmp/barnraise-wan.lock")
"""One cable at a time on one machine: its namespaces have fixed names."""
SECONDS = 15.0
"""Half of what the benchmark takes by itself, which makes two minutes less of eight rows. A tensor let through at once
would be half of what passes meanwhile, a piece of 64 KiB 0.4 %: 2 % still tell the one from the other."""


@pytest.fixture
def wan(capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The script, with the cable up; without it the limits are not known to hold here, and that is said aloud."""
    probe = ["ip", "-n", "NAME", "link", "add", "probe0", "type", "veth", "peer", "name", "probe1"]
    reason = why_not(("ip", "bash"), probe, "this kernel makes no veth pairs")
    if reason:
        with capsys.disabled():
            print(f"\n\n!!! THE OWNER'S LIMITS WERE NOT TESTED ON REAL NETWORKS: {reason}\n")
        pytest.skip(reason)
    with alone(LOCK):
        subprocess.run([WAN, "veth"], check=True, timeout=60)
        try:
            yield WAN
        finally:
            subprocess.run([WAN, "down"], check=True, timeout=60)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_limit_holds_within_two_percent_on_every_way(wan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Up and down, by TCP, through a relay, by QUIC and by data channel: for a quarter of a minute tensors always wait,
    both sides ping and both measure; the network interface carries the limit within 2 %, and the link lives."""
    failures = []
    for way in WAYS:
        for direction in DIRECTIONS:
            held = measure(wan, way, direction, seconds=SECONDS)
            with capsys.disabled():
                print(f"\n{held}", end="", flush=True)
                if held.failure and held.share <= 1.0:
                    # Too much is our fault alone. Too little may be the machine's, which does other things meanwhile.
                    held = measure(wan, way, direction, seconds=SECONDS)
                    print(f"\nonce more:\n{held}", end="", flush=True)
            failures += [held.failure] if held.failure else []
    assert not failures, failures

"""What was measured when an owner was asked is told to the run at starts that measure nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec

from node.compute.devices.choice import DeviceChoice
from node.visit.kept_speed import FILE, keep_speeds, kept_speeds

BOTH = DeviceChoice.parse_all("cuda:0,1")


def test_each_device_has_its_own_speed_whichever_is_lent(tmp_path: Path) -> None:
    """One of two, or both in another order, are as fast as they were; with other terms or threads nothing is known."""
    keep_speeds(tmp_path, "c1", BOTH, 2, (100.0, 50.0))
    assert kept_speeds(tmp_path, ("c2", "c1"), BOTH[::-1], 2) == (50.0, 100.0)
    assert kept_speeds(tmp_path, ("c1",), BOTH[1:], 2) == (50.0,)
    assert kept_speeds(tmp_path, ("c1",), DeviceChoice.parse_all("cuda:0,2"), 2) == (100.0, 0.0)
    assert kept_speeds(tmp_path, ("c1",), BOTH, 1) == kept_speeds(tmp_path, ("c2",), BOTH, 2) == (0.0, 0.0)


def test_what_an_older_build_has_kept_counts_on(tmp_path: Path) -> None:
    """A service that is begun at logon never measures: it would tell the run nothing for ever after an update."""
    old = {"terms_hash": "c1", "device": "cuda:0", "threads": 1, "tokens_per_s": 80.0}
    (tmp_path / FILE).write_bytes(msgspec.json.encode(old))
    assert kept_speeds(tmp_path, ("c1",), BOTH, 1) == (80.0, 0.0)
    (tmp_path / FILE).write_bytes(b"{")
    assert kept_speeds(tmp_path, ("c1",), BOTH, 1) == (0.0, 0.0)

"""A volunteer's own daemon with one thing wrong in it: `python -m tests.integration.bad_volunteer DEED join LINK …`.

Everything else is production: the handshake, the links, the messages, the pings. So it is what a broken computer, a
poor line or a member who means harm looks like to the servers.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from node.process.device_lane import DeviceLane
from node.volunteer.volunteer import VolunteerMachine
from protocol.cli import main
from protocol.messages import Lease

DEVICE_DEEDS = (
    "hangs", "dawdles", "huge", "steers", "flips", "leans", "inflates",
    "dies_between_forwards", "dies_between_backwards", "dies_with_a_loss", "dies_owing_weights",
)  # fmt: skip
"""What `bad_device.py` does in the process that has the device."""


def gives_back() -> None:
    """It asks for work, is sent the tensors, and returns every lease."""

    def on_lease(self: Any, issuer: Any, lease: Lease, now: float) -> None:
        self._given[issuer] = max(0, self._given[issuer] - 1)
        self._out.drop(lease.tensors)
        self._words.give_back(issuer, lease.tasks, "too many leases")

    VolunteerMachine._on_lease = on_lease  # type: ignore[method-assign]


if __name__ == "__main__":
    deed = sys.argv.pop(1)
    if deed in DEVICE_DEEDS:
        os.environ["BARNRAISE_TEST_DEED"] = deed
        # The device's process is started with -P, and tests are no installed package.
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        DeviceLane.module = "tests.integration.bad_device"
    else:
        {"gives_back": gives_back}[deed]()
    main()

"""A volunteer's own daemon with one thing wrong in it: `python -m tests.integration.bad_volunteer DEED join LINK …`.

Everything else is production: the handshake, the links, the messages, the pings. So it is what a broken computer, a
poor line or a member who means harm looks like to the servers. What a deed changes is loaded by it alone, so that the
command loads as it always does.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from node.process.device_start import DeviceStart
from protocol.base.machine import HangUp
from protocol.cli import main

DEVICE_DEEDS = (
    "paced", "hangs", "dawdles", "huge", "overflows", "claims_losses", "sends_back_huge", "steers",
    "flips", "scales", "leans", "biases", "backdoors", "brings_nothing", "brings_noise", "brings_the_first_again",
    "lends", "brings_anothers", "leaves_out_a_layer", "computes_coarsely", "is_lazy", "inflates",
    "dies_between_forwards", "dies_between_backwards", "dies_with_a_loss", "dies_owing_weights",
)  # fmt: skip
"""What `bad_device.py` does in the process that has the device."""


def gives_back() -> None:
    """It asks for work, is sent the tensors, and returns every lease."""

    from node.volunteer.volunteer import VolunteerMachine

    def on_lease(self: Any, issuer: Any, lease: Any, now: float) -> None:
        _ask_for_another(self, issuer, lease)
        self._words.give_back(issuer, lease.tasks, "too many leases")

    VolunteerMachine._on_lease = on_lease  # type: ignore[method-assign]


def hoards() -> None:
    """It asks for work again and again, keeps every lease, and computes nothing."""
    from node.volunteer.volunteer import VolunteerMachine

    VolunteerMachine._on_lease = lambda self, issuer, lease, now: _ask_for_another(self, issuer, lease)  # type: ignore[method-assign]


def _ask_for_another(volunteer: Any, issuer: Any, lease: Any) -> None:
    """As if the lease had been done."""
    if lease.recompute or lease.tasks[0].op == "F":
        volunteer._slots.used(issuer, lease)
    volunteer._out.drop(lease.tensors)


def reuses_ids() -> None:
    """All its contributions have the number of the first, in whatever step."""
    from node.volunteer.gradients import Gradients

    send = Gradients._send

    def same(self: Any, upload: Any, server: Any) -> None:
        first = msgspec.structs.replace(upload.contribution, number=1)
        send(self, dataclasses.replace(upload, contribution=first), server)

    Gradients._send = same  # type: ignore[method-assign]


def flaps() -> None:
    """Its link to a server ends whenever it has brought a result and summed something up, and comes back after
    seconds."""
    from node.volunteer.words import Words

    tell = Words.tell_summed
    has_told: set[Any] = set()

    def then_go(self: Any, server: Any, summed: Any, complete: bool) -> None:
        if server in has_told:
            has_told.discard(server)
            self._out.add(HangUp(server, "flaps"))
        else:
            has_told.add(server)
            tell(self, server, summed, complete)

    Words.tell_summed = then_go  # type: ignore[method-assign]


def boasts() -> None:
    """It says that it computes a million million tokens a second, and dawdles."""
    from node.machine.survey import SurveyDesk

    SurveyDesk.tokens_per_s = lambda self, config: 1e12  # type: ignore[method-assign]


if __name__ == "__main__":
    deed = sys.argv.pop(1)
    if deed in DEVICE_DEEDS:
        os.environ["BARNRAISE_TEST_DEED"] = deed
        # The device's process is started with -P, and tests are no installed package.
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        DeviceStart.module = "tests.integration.bad_device"
    else:
        {deed.__name__: deed for deed in (gives_back, hoards, flaps, reuses_ids, boasts)}[deed]()
    main()

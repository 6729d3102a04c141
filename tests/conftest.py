"""What all tests share: async tests run on trio, and property tests are judged by what they find, not by their time."""

from __future__ import annotations

from hypothesis import settings
from pytest_trio.enable_trio_mode import *  # noqa: F403  (the plug-in's own way to switch it on)

settings.register_profile("barnraise", deadline=None, print_blob=True)
settings.load_profile("barnraise")

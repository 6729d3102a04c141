"""What all tests share: property tests are judged by what they find, never by how long they took."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("barnraise", deadline=None, print_blob=True)
settings.load_profile("barnraise")

"""How many file descriptors this process may have: each link takes one or two, and without one nothing can be saved."""

from __future__ import annotations

import contextlib

KEPT_BACK = 256
"""For the journal, lanes, listeners, helpers, half-open calls, scrapers of /metrics, and a checkpoint's files."""
LINKS_MIN = 64
LINKS_UNKNOWN = 4096
"""Where the system does not say (Windows counts no descriptors)."""


def links_max() -> int:
    """Links to hold at most. Raises the soft limit (often 1,024) to what the administrator allows first."""
    try:
        import resource
    except ImportError:
        return LINKS_UNKNOWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and (hard == resource.RLIM_INFINITY or soft < hard):
        wanted = 65536 if hard == resource.RLIM_INFINITY else hard
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it: then the soft one counts
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, 65536)), hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return LINKS_UNKNOWN
    return max(LINKS_MIN, (soft - KEPT_BACK) // 2)

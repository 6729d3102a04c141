"""`python -m tests.benchmarks.watched COMMAND …`: an ordinary `barnraise` that counts what being watched costs it.

Spans are what `barnraise run trace` shows, records what `/metrics` shows; each second the seconds that went into noting
them are written into the state folder. `demo` starts its children so.
"""

from __future__ import annotations

import sys
from pathlib import Path

from node.demo.processes import Children
from node.process.metrics import NodeMetrics
from protocol.cli import main
from protocol.drive.metrics import Metrics
from protocol.run.spans import SpanRing
from tests.benchmarks.counted import Counter

FILE = "watched_seconds.json"

if __name__ == "__main__":
    if sys.argv[1] == "demo":
        Children.module = "tests.benchmarks.watched"
    else:
        counter = Counter()
        counter.count("spans", SpanRing, "add")
        counter.count("records", Metrics, "record")
        counter.count("records", NodeMetrics, "record")
        counter.write_each_second(Path(sys.argv[sys.argv.index("--state") + 1]), FILE)
    main()

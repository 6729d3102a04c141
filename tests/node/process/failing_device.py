"""A volunteer's device whose first forward ends as a kernel that could not be launched: the driver answers nothing more
to this process. Started in place of the ordinary one by `test_device_lane.py`.
"""

from __future__ import annotations

import sys
from typing import Any

from node.compute.device_process import main
from node.compute.worker import StageWorker


def fails(self: StageWorker, *_: Any, **__: Any) -> Any:
    raise RuntimeError("CUDA error: unspecified launch failure")


if __name__ == "__main__":
    StageWorker.forward = fails  # type: ignore[method-assign]
    main(sys.argv[1:])

"""Bytes of tensors that a piece of work leaves alive, and the most that it has alive at one time.

Counted by torch's profiler at the allocator, so buffers that C++ holds (DDP's buckets) count, and the
process's other memory does not. Memory from before that is freed by the work is not seen.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile


def alive_and_peak(work: Callable[[], object]) -> tuple[int, int]:
    """Run ``work`` once: bytes alive after it, and at most during it, beyond those alive before."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # it reports its start and stop otherwise
    everywhere = _ExperimentalConfig(profile_all_threads=True)  # a transport's thread may be the last to let go
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, experimental_config=everywhere) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.json"
        profiler.export_chrome_trace(str(path))
        return sums_of(json.loads(path.read_text())["traceEvents"])


def sums_of(events: list[dict[str, object]]) -> tuple[int, int]:
    """The last and the highest sum of the memory events, in the order in which they happened."""
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])
    sums = list(accumulate((int(change["Bytes"]) for change in changes), initial=0))
    return sums[-1], max(sums)

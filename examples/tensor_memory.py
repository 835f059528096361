"""Bytes of tensors: what is held at rest, and the most that is alive during a training step.

Both count memory of tensors, not of the process: Python, torch's libraries and the transport's own
buffers are not in it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors; memory that several share counts once.

    A view counts the whole buffer that it keeps alive: ZeRO-1's rows count the full parameter.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def added_at_peak(step: Callable[[], None], device: torch.device) -> int:
    """Run ``step`` once: the most bytes that were alive at one time beyond those alive before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # it reports its start and stop otherwise
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])  # the order in which they happened
    return max(accumulate((int(change["Bytes"]) for change in changes), initial=0))

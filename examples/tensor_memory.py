"""Counts bytes of tensors: those held at rest, and the most alive at one time in a training step.

Both count tensors' memory, not the process's: they leave out Python, torch's libraries and the
transport's buffers.
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
    """Bytes of the tensors' storages; a shared storage counts once.

    A view counts its whole storage: ZeRO-1's rows are a view of the full parameter, so the full parameter counts.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def added_at_peak(step: Callable[[], None], device: torch.device) -> int:
    """Run ``step`` once; return the most bytes alive at one time, less those alive before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints its start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])  # in order of time
    return max(accumulate((int(change["Bytes"]) for change in changes), initial=0))

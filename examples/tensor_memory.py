"""Counts bytes of tensors: those held at rest, and the most alive at one time in a training step.

Both count tensors' memory, not the process's: they leave out Python, torch's libraries and the
transport's buffers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages; a shared storage counts once.

    A view counts its whole storage: ZeRO-1's rows are a view of the full parameter, so the full parameter counts.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, slots=True, order=True)
class Change:
    """What a step did to the bytes alive: how many it left behind, and the most that it added at one time."""

    left: int
    peak: int


def change_by(step: Callable[[], object], device: torch.device) -> Change:
    """Run ``step`` once.

    On CPUs torch's profiler sees only allocations and frees of its own thread. If another thread (a transport's) frees
    a tensor, the tensor seems to stay alive; so of several like steps that free what they allocate, the least is true.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        left = torch.cuda.memory_allocated(device) - before
        return Change(left, torch.cuda.max_memory_allocated(device) - before)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints its start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        return change_in(json.loads(path.read_text())["traceEvents"])


def change_in(events: list[dict[str, Any]]) -> Change:
    """The last and the highest running sum of the profiler's memory events, in the order in which they happened."""
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])
    sums = list(accumulate((int(change["Bytes"]) for change in changes), initial=0))
    return Change(sums[-1], max(sums))


def added_at_peak(step: Callable[[], object], device: torch.device, times: int = 1) -> int:
    """The most bytes that ``step`` adds at one time; ``times`` like steps are run, and the least is taken."""
    return min(change_by(step, device) for _ in range(times)).peak

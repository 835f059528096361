"""Counts bytes of tensors: those held at rest, and the most alive at one time in a training step.

Both count tensors' memory, not the process's: they leave out Python, torch's libraries and gloo's buffers. The peak
has the tensors of all threads, and so those of the transport.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


def added_at_peak(step: Callable[[], object], device: torch.device) -> int:
    """Run ``step`` once; return the most bytes alive at one time, less those alive before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints its start and stop
    with counting_all_threads(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        return highest_added(json.loads(path.read_text())["traceEvents"])


@contextmanager
def counting_all_threads() -> Iterator[None]:
    """Makes torch's count of CPU memory that of the process: else it leaves out what threads allocate and free that are
    not profiled, such as a transport's. Private in torch, and there is no public way."""
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def highest_added(events: list[dict[str, Any]]) -> int:
    """The highest total after one of the profiler's memory events, less the total before the first of them."""
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))  # the index alone orders each thread's
    totals = [int(event["args"]["Total Allocated"]) for event in changes]
    return max(totals) - (totals[0] - int(changes[0]["args"]["Bytes"])) if totals else 0

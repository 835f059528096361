"""Counts bytes of tensors: those held at rest, and those that a training step, or each part of one, adds to them.

All count tensors' memory, not the process's: they leave out Python, torch's libraries and gloo's buffers. The peak
has the tensors of all threads, and so those of the transport.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

import thunder_zero as tz

MARK = "part of the step: "


def parameters_of(model: nn.Module) -> list[Tensor]:
    """Return the tensors that hold a model's parameters on this rank: those at rest, with their padding.

    ZeRO-1's rows are a view of the full parameter, of which a DTensor that the optimizer steps knows nothing.
    """
    if not isinstance(model, tz.ZeroModule):
        return list(model.parameters())
    planned = model.state.plan.by_name
    ignored = [param for name, param in model.named_parameters() if name not in planned]
    return [*(param.rows for param in model.state.params.values()), *ignored]


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages on this rank. A shared storage counts once, and a view's storage in
    full."""
    storages = [part_of(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True, slots=True)
class Added:
    """Bytes that a step adds to those alive before it: at the end of one of its parts, and at most during that part."""

    at_end: int
    highest: int


def added_at_peak(step: Callable[[], object], device: torch.device) -> int:
    """Run ``step`` once; return the most bytes alive at one time, less those alive before it."""
    return added_in_parts({"step": step}, device)["step"].highest


def added_in_parts(parts: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, Added]:
    """Run the parts of a step, one after the other; return what each adds to the bytes alive before the first."""
    if device.type == "cuda":
        return _added_on_cuda(parts, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints its start and stop
    with counting_all_threads(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for name, run in parts.items():
            with record_function(MARK + name):
                run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        profiler.export_chrome_trace(str(path))
        return added_by_mark(json.loads(path.read_text())["traceEvents"])


def _added_on_cuda(parts: Mapping[str, Callable[[], object]], device: torch.device) -> dict[str, Added]:
    before = torch.cuda.memory_allocated(device)
    found = {}
    for name, run in parts.items():
        torch.cuda.reset_peak_memory_stats(device)
        run()
        now, highest = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        found[name] = Added(now - before, highest - before)
    return found


@contextmanager
def counting_all_threads() -> Iterator[None]:
    """Make torch's count of CPU memory that of the process. Otherwise it leaves out what threads allocate that are not
    profiled.

    Such threads are a transport's. The function is private in torch; no public one exists.
    """
    (library,) = (Path(torch.__file__).parent / "lib").glob("libc10.*")
    flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def added_by_mark(events: Iterable[dict[str, Any]]) -> dict[str, Added]:
    """Return what each marked part adds, from the profiler's events: marks, and totals after each allocation and
    free."""
    marks = [event for event in events if event["name"].startswith(MARK)]
    changes = [event for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))  # the index alone orders each thread's
    totals = [int(event["args"]["Total Allocated"]) for event in changes]
    times = [event["ts"] for event in changes]
    marks.sort(key=lambda mark: mark["ts"])
    starts = [bisect_left(times, mark["ts"]) for mark in marks]
    first = starts[0] if starts else 0
    before = totals[first] - int(changes[first]["args"]["Bytes"]) if first < len(changes) else 0
    found, now = {}, before
    for mark, start, end in zip(marks, starts, [*starts[1:], len(totals)], strict=True):
        during = [now, *totals[start:end]]
        now = during[-1]
        found[mark["name"].removeprefix(MARK)] = Added(now - before, max(during) - before)
    return found

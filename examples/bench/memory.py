"""Bytes of tensors alive: what a contestant holds between steps, and the most that is alive during a step."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

REPEATS = 5
PLAIN = (torch.Tensor, nn.Parameter)  # a DTensor's memory is that of the plain tensor inside


def alive() -> dict[int, int]:
    """Bytes of all memory behind CPU tensors that Python can reach, by address; what is shared counts once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in PLAIN and thing.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def held_bytes(before: dict[int, int], model: nn.Module) -> int:
    """Bytes alive now and not ``before``; and DDP's buckets, which no Python object holds."""
    held = sum(nbytes for address, nbytes in alive().items() if address not in before)
    if isinstance(model, DistributedDataParallel):
        held += sum(param.numel() * param.element_size() for param in model.parameters())
    return held


def added_at_peak(step: Callable[[], object]) -> int:
    """The most bytes alive at one time in a step that leaves no more than it found, beyond those alive before it.

    Torch's profiler sees what its own thread allocates and frees. Where another thread (a transport's) is the last
    to let go of a tensor, that tensor seems to stay; so of several steps the one that seems to leave least counts.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # it reports its start and stop otherwise
    found = []
    for _ in range(REPEATS):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.json"
            profiler.export_chrome_trace(str(path))
            found.append(sums_of(json.loads(path.read_text())["traceEvents"]))
    _, peak = min(found, key=lambda sums: (sums[0], -sums[1]))
    return peak


def sums_of(events: list[dict[str, object]]) -> tuple[int, int]:
    """The last and the highest sum of the memory events, in the order in which they happened."""
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])
    sums = list(accumulate((int(change["Bytes"]) for change in changes), initial=0))
    return sums[-1], max(sums)

"""Counts the bytes of tensors that a contestant holds between steps, and their peak during a step."""

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
PLAIN = (torch.Tensor, nn.Parameter)  # the memory of a DTensor is that of its plain tensor


def alive() -> dict[int, int]:
    """Bytes of the storages of all CPU tensors that Python can reach, by address; a shared storage counts once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in PLAIN and thing.device.type == "cpu"]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def held_bytes(before: dict[int, int], model: nn.Module) -> int:
    """Bytes alive now but not ``before``; and DDP's buckets, which no Python object holds."""
    held = sum(nbytes for address, nbytes in alive().items() if address not in before)
    if isinstance(model, DistributedDataParallel):
        held += sum(param.numel() * param.element_size() for param in model.parameters())
    return held


def added_at_peak(step: Callable[[], object]) -> int:
    """The peak of bytes alive during a step, minus those alive before it. The step must free all that it allocates.

    Torch's profiler sees only allocations and frees of its own thread. If another thread (a transport's) frees a
    tensor, the tensor seems to stay alive; so the step counts that seems to leave the fewest bytes.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # otherwise it logs its start and stop
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
    """The last and the highest running sum of the memory events, in the order in which they happened."""
    changes = [event["args"] for event in events if event["name"] == "[memory]"]
    changes.sort(key=lambda change: change["Ev Idx"])
    sums = list(accumulate((int(change["Bytes"]) for change in changes), initial=0))
    return sums[-1], max(sums)

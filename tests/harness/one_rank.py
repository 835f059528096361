"""One rank that communicates all the same: its transport is the NCCL one, over a real group of one rank.

A rank alone sends nothing, so on one GPU nothing of the NCCL path would run. Here it does: gathers, reductions,
streams, launches; only the peers are missing, so the numbers are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from tests.harness.late import CoalescedSums
from tests.harness.ranks import everyone
from thunder_zero.comm import backends
from thunder_zero.comm.transport import Transport


@contextmanager
def group_of_one(device: str) -> Iterator[dist.ProcessGroup]:
    """A group of one rank: NCCL for a GPU's tensors, gloo for those in host memory."""
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield everyone()
    finally:
        dist.destroy_process_group()


@contextmanager
def communicating(make: Callable[[], Transport] | None = None) -> Iterator[None]:
    """Models that are sharded inside of the block use this transport instead of the one that sends nothing.

    Sums by default: with one rank they are the means, and NCCL's own mean may be wrong there, as FSDP2's code says.
    """
    with mock.patch.object(backends, "SingleRank", make or (lambda: CoalescedSums(everyone()))):
        yield

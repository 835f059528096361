"""One rank that communicates although it has no peers: it uses the NCCL transport over a group of one rank.

A single rank normally sends nothing, so one GPU would run no line of the NCCL path. Here it runs gathers, reductions,
streams and launches. Without peers the numbers are those of one process.
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
    """Yield a group of one rank: NCCL for tensors on a GPU, gloo for tensors in host memory."""
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
    """Let models sharded inside the block use the transport that ``make`` returns, instead of one that sends nothing.

    The default transport sums: with one rank the sum is the mean, and FSDP2's code says that NCCL's mean may be wrong.
    """
    with mock.patch.object(backends, "SingleRank", make or (lambda: CoalescedSums(everyone()))):
        yield

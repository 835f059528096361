"""What announcing collective tags costs on loopback: phases of a step with and without it, in turn.

    python examples/bench/collective_tags.py

A phase gathers two buckets of eight tensors, 4 KiB each, less than any of a real model: nothing hides the
announcement. Each round runs 50 phases of each kind. Wall time is that of the slowest rank; CPU time is that of all
threads of rank 0, which a busy machine disturbs less. Medians and quartiles over rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import thunder_zero  # noqa: F401  # first of its imports
from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.pairwise import PairwiseGloo
from thunder_zero.plan.mesh import SHARD

WORLD_SIZES = (2, 4)
ROUNDS, PHASES = 10, 50
ROWS, WIDTH, TENSORS = 32, 32, 8


def phase(transport: TaggedTransport, shards: list[torch.Tensor]) -> None:
    """Two gathers, as a forward launches and ends them."""
    transport.enter_phase("forward", "schedule", 0)
    handles = [transport.all_gather(shards, [(ROWS, WIDTH)] * TENSORS) for _ in range(2)]
    for handle in handles:
        handle.wait()


def spread(seconds: list[float]) -> str:
    """Median and quartiles in microseconds, without the first round."""
    low, middle, high = (f"{1e6 * quartile:.0f}" for quartile in statistics.quantiles(seconds[1:], n=4))
    return f"{middle} us ({low} to {high})"


def measure(rank: int, world_size: int, store: str) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    shards = [torch.zeros(ROWS // world_size, WIDTH) for _ in range(TENSORS)]
    kinds = {
        on: TaggedTransport({SHARD: PairwiseGloo(group)}, "model 0 (Net)", group, announces=on) for on in (False, True)
    }
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS + 1):  # the first one warms up
        for on, transport in kinds.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(PHASES):
                phase(transport, shards)
            cpu[on].append((time.process_time() - used) / PHASES)
            slowest = torch.tensor((time.perf_counter() - start) / PHASES)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            wall[on].append(slowest.item())
    if rank == 0:
        for on in kinds:
            how = "announced" if on else "not announced"
            print(f"W = {world_size}, {how}: {spread(wall[on])} of wall time, {spread(cpu[on])} of CPU time a phase")
    dist.destroy_process_group()


if __name__ == "__main__":
    for size in WORLD_SIZES:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure, (size, str(Path(folder) / "store")), size)

"""CPU time of a training step on two ranks, of all threads of a rank, in turn for each contestant.

    python examples/bench/host_time.py                       the table
    python examples/bench/host_time.py --only zero3 --profile zero3.prof    cProfile of rank 0's main thread

A GPT so small that a step is bound by the host: 12 blocks of width 64, 2 x 16 tokens a rank, over gloo. Contestants are
built in the same processes and run in turn, in rounds; the number is the median over rounds of rank 0's CPU time
(``time.process_time``, with the threads that send), which a busy machine disturbs less than wall time. ``eager`` trains
alone, without other ranks. All step by SGD.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import thunder_zero as tz  # before thunder
from examples.bench.contestants import Step, build_ddp, build_eager, build_fsdp2, trains
from examples.bench.model import Size, make_batch, make_model
from thunder_zero.capture.arguments import Fuser

SIZE = Size(blocks=12, width=64, heads=4, vocabulary=256, sequences=2, tokens=16)
WARM_UP, ROUNDS, STEPS = 8, 5, 20


def build_zero(stage: int, fuse: Fuser | None = None) -> Step:
    """tz.compile, for one stage."""
    return trains(tz.compile(make_model(SIZE), stage=stage, fuse=fuse))[1]


CONTESTANTS: dict[str, Callable[[], Step]] = {
    "eager": lambda: build_eager(SIZE)[1],
    "ddp": lambda: build_ddp(SIZE, compiled=False)[1],
    "fsdp2": lambda: build_fsdp2(SIZE, reshard=True)[1],
    "zero0": lambda: build_zero(0),
    "zero2": lambda: build_zero(2),
    "zero3": lambda: build_zero(3),
    "zero0, inductor": lambda: build_zero(0, "inductor"),
    "zero2, inductor": lambda: build_zero(2, "inductor"),
    "zero3, inductor": lambda: build_zero(3, "inductor"),
}


def measure(rank: int, names: list[str], steps: int, profile: str, store: str) -> None:
    """One rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    batch = make_batch(SIZE, rank)
    contestants = {name: CONTESTANTS[name]() for name in names}
    for step in contestants.values():
        for _ in range(WARM_UP):
            step(*batch)
    gc.collect()
    gc.freeze()  # what compiling left is not traversed in every collection: this is about steps
    used: dict[str, list[float]] = {name: [] for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    profiler = cProfile.Profile(time.thread_time)
    for _ in range(ROUNDS):
        for name, step in contestants.items():
            dist.barrier()
            if rank == 0 and profile:
                profiler.enable()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(*batch)
            used[name].append((time.process_time() - cpu) / steps)
            taken[name].append((time.perf_counter() - wall) / steps)
            profiler.disable()
    if rank == 0:
        print(table(used, taken))
        if profile:
            profiler.dump_stats(profile)
    dist.destroy_process_group()


def table(used: dict[str, list[float]], taken: dict[str, list[float]]) -> str:
    """Milliseconds of a step by contestant: CPU time, its range over rounds, as a multiple of DDP's, and wall time."""
    lines = ["| contestant | CPU ms | least to most | of DDP | wall ms |", "|---|---|---|---|---|"]
    ddp = statistics.median(used["ddp"]) if "ddp" in used else None
    for name, seconds in used.items():
        middle, wall = statistics.median(seconds), statistics.median(taken[name])
        share = f"{middle / ddp:.2f}" if ddp else ""
        spread = f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}"
        lines.append(f"| {name} | {1e3 * middle:.1f} | {spread} | {share} | {1e3 * wall:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="contestants")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each contestant in a round")
    parser.add_argument("--profile", default="", help="write a profile of rank 0's main thread to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = options.only, options.steps, options.profile, str(Path(folder) / "store")
        mp.spawn(measure, given, 2)


if __name__ == "__main__":
    main()

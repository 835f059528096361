"""Measures two ranks of unequal speed: equal shares of each batch, and shares in proportion to speeds.

python examples/bench/shares.py [--rounds 5] [--steps 1] [--stage 2] [--width 512] [--batch 96] [--asleep MS]

Each rank is pinned to a core of its own. The parent stops rank 1 for half of the time (SIGSTOP, SIGCONT), so that it
has half of rank 0's speed. With ``--asleep`` nothing is stopped: rank 0 sleeps MS milliseconds for each item, rank 1
twice as long, in place of most of the compute, so that other work on the cores matters less.

*Alone* are steps of the plain module on each rank, without communication: the sum of both ranks' speeds is what no
shares can exceed. All contestants run in the same processes, in turn; cells are medians over rounds with quartiles.
Other work on the cores changes speeds, so look at the ratios. Linux.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import thunder_zero as tz

TOKENS, LAYERS = 256, 8
PERIOD = 0.01  # seconds in which rank 1 runs for a half and is stopped for a half
Step = Callable[[], None]


def build(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.GELU())))


def trains(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Callable[[], torch.Tensor], asleep: float
) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        x = batches()
        sleep(asleep * len(x))
        model(x).square().mean().backward()
        optimizer.step()

    return step


def endless(data: TensorDataset, sampler: tz.ShareSampler) -> Callable[[], torch.Tensor]:
    """Return a function that gives this rank's items of the next batch."""

    def rows() -> Any:
        for epoch in range(1 << 30):
            sampler.set_epoch(epoch)
            for (items,) in DataLoader(data, batch_sampler=sampler):
                yield items

    return rows().__next__


def measure(rank: int, store: str, options: argparse.Namespace, ready: Any, results: Any) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    batch: int = options.batch
    data = TensorDataset(torch.randn(4 * batch, TOKENS, options.width))
    plain, asleep = build(options.width), options.asleep * (1 + rank) / 1000  # seconds for each item
    steps: dict[str, tuple[Step, int]] = {}  # a step, and the items that this rank takes in it
    for name, shares in (("equal", (1, 1)), ("2:1", (2, 1))):
        model = tz.compile(deepcopy(plain), tz.Policy(stage=options.stage, shares=shares))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        items = batch * shares[rank] // sum(shares)
        steps[name] = trains(model, optimizer, endless(data, tz.ShareSampler(data, batch, shares)), asleep), items
    alone, x = torch.optim.AdamW(plain.parameters(), fused=True), data.tensors[0][: batch * (2 - rank) // 3]
    steps["alone"] = trains(plain, alone, lambda: x, asleep), len(x)
    for step, _ in steps.values():
        for _ in range(2):
            step()
    ready.put(os.getpid())
    sleep(1)  # until the parent stops rank 1 now and then
    local = trains(plain, alone, lambda: data.tensors[0][:2], asleep)
    found = [tz.shares_of(local, batch, steps=20) for _ in range(3)]
    rates: list[dict[str, float]] = []
    for _ in range(options.rounds):
        rates.append({})
        for name, (step, items) in steps.items():
            dist.barrier()
            start = perf_counter()
            for _ in range(options.steps):
                step()
            rates[-1][name] = items * options.steps / (perf_counter() - start)
    start = perf_counter()
    for _ in range(20):
        optimizer.step()
    results.put((rank, rates, found, (perf_counter() - start) / 20))
    dist.barrier()


def slow_down(pid: int, until: Callable[[], bool]) -> None:
    """Stop a process for half of each period."""
    try:
        while not until():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(pid, number)
                sleep(PERIOD / 2)
    finally:
        os.kill(pid, signal.SIGCONT)


def cell(values: list[float]) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{median(values):7.2f}  ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--asleep", type=float, default=0)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ready, results = context.Queue(), context.Queue()
        arguments = (str(Path(folder) / "store"), options, ready, results)
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(2)]
        for process in ranks:
            process.start()
        for _ in ranks:
            ready.get()
        if not options.asleep:
            slow_down(ranks[1].pid or 0, until=lambda: not results.empty() or not ranks[1].is_alive())
        (_, fast, found, _), (_, slow, _, of_optimizer) = sorted(results.get() for _ in ranks)
        for process in ranks:
            process.join()
    print(f"{options.batch} items of {TOKENS} tokens a step, stage {options.stage}, width {options.width}")
    print(f"shares_of: {found}")
    alone = [[one["alone"] for one in side] for side in (fast, slow)]
    together = [sum(pair) for pair in zip(*alone, strict=True)]
    rows = {
        "rank 0 alone, items / s": alone[0],
        "rank 1 alone, items / s": alone[1],
        "rank 0 / rank 1": [first / second for first, second in zip(*alone, strict=True)],
    }
    for name in ("equal", "2:1"):
        rate = [first[name] + second[name] for first, second in zip(fast, slow, strict=True)]
        rows[f"{name}, items / s of both"] = rate
        rows[f"{name} / both alone"] = [value / whole for value, whole in zip(rate, together, strict=True)]
        rows[f"{name} / 3 x rank 1 alone"] = [value / (3 * one) for value, one in zip(rate, alone[1], strict=True)]
    gains = [
        new / old for new, old in zip(rows["2:1, items / s of both"], rows["equal, items / s of both"], strict=True)
    ]
    for name, values in {**rows, "2:1 / equal": gains}.items():
        print(f"{name:<26}{cell(values)}")
    print(f"rank 1's step of its rows by AdamW: {1000 * of_optimizer:.2f} ms")


if __name__ == "__main__":
    main()

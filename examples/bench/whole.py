"""Measures a step with Muon on whole matrices, beside one process and torch's Muon over FSDP2's DTensors.

python examples/bench/whole.py [--ranks 2] [--rounds 9] [--blocks 2] [--width 512]

All contestants run in the same processes, on gloo over loopback, alternately; AdamW steps what is no matrix of a block.
A cell is the median over rounds, of the slowest rank, with the quartiles. Then the FLOPs of orthogonalising on the
busiest rank, counted as torch dispatches them, for 1 to 8 ranks.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import thunder_zero as tz  # before thunder
from examples.bench.model import Size, loss_of, make_batch, make_model
from thunder_zero.optim.owners import Piece, assign, work_of_shape

import thunder

SMALL = 16 << 20  # bytes of a bucket on the CPU
Timed = Callable[[], tuple[float, float]]  # seconds of a step, and of its optimizers


def matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all others."""
    named = list(model.named_parameters())
    chosen = {name for name, param in named if param.ndim == 2 and "blocks" in name}
    return [param for name, param in named if name in chosen], [param for name, param in named if name not in chosen]


def timed(model: nn.Module, size: Size, rank: int, muon: Callable[..., optim.Optimizer]) -> Timed:
    """A function that takes one step."""
    of_blocks, others = matrices(model)
    optimizers = [muon(of_blocks, lr=1e-3), optim.AdamW(others)]
    tokens, targets = make_batch(size, rank)

    def step() -> tuple[float, float]:
        dist.barrier()
        start = perf_counter()
        loss_of(model(tokens), targets).backward()
        between = perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        end = perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return end - start, end - between

    return step


def contestants(size: Size, rank: int) -> dict[str, Timed]:
    """By name; FSDP2's mesh divides the rows."""
    ours = thunder.jit(make_model(size), transforms=[tz.ZeroTransform(stage=3)])
    theirs = make_model(size)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    return {
        "one process": timed(make_model(size), size, rank, optim.Muon),
        "ZeRO-3, tz.whole": timed(ours, size, rank, partial(tz.whole, optim.Muon)),
        "FSDP2, Muon on DTensors": timed(theirs, size, rank, optim.Muon),
    }


def measure(rank: int, world_size: int, rounds: int, size: Size, folder: str) -> None:
    """One rank; rank 0 writes the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    steps = contestants(size, rank)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for round_ in range(rounds + 2):
        for name, step in steps.items():
            seconds = torch.tensor(step())
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if round_ > 1:
                found[name].append((float(seconds[0]), float(seconds[1])))
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


def cell(values: list[float]) -> str:
    """The median with the quartiles, in ms."""
    low, middle, high = (f"{1000 * value:.0f}" for value in quantiles(values, n=4))
    return f"{middle} ({low}-{high})"


def orthogonalising(shapes: list[tuple[int, ...]]) -> int:
    """The FLOPs of Muon's step on matrices of these shapes, counted on tensors without values."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param)
    with FlopCounterMode(display=False) as counter:
        if params:
            optim.Muon(params).step()
    return int(counter.get_total_flops())


def flops_of_busiest(shapes: list[tuple[int, ...]], ranks: int) -> int:
    """Those of the rank with the most."""
    pieces = [Piece(at, work_of_shape(shape), 4 * shape[0] * shape[1]) for at, shape in enumerate(shapes)]
    owned: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for bucket in assign(pieces, ranks, SMALL, [0] * ranks):
        for number, owner in bucket:
            owned[owner].append(shapes[number])
    return max(map(orthogonalising, owned))


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    size = Size(options.blocks, options.width)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (options.ranks, options.rounds, size, folder), options.ranks)
        found = torch.load(Path(folder) / "found.pt")
    print(f"{options.blocks} blocks of width {options.width}, {options.ranks} ranks, {options.rounds} rounds\n")
    print("| | step, ms | its optimizers, ms |\n| --- | --- | --- |")
    for name, times in found.items():
        print(f"| {name} | {cell([step for step, _ in times])} | {cell([part for _, part in times])} |")
    shapes = [tuple(param.shape) for param in matrices(make_model(Size()))[0]]
    alone = orthogonalising(shapes)
    print("\n| ranks | GFLOP of orthogonalising on the busiest one | of one process |\n| --- | --- | --- |")
    for ranks in range(1, 9):
        busiest = flops_of_busiest(shapes, ranks)
        print(f"| {ranks} | {busiest / 1e9:.1f} | {busiest / alone:.1%} |")


if __name__ == "__main__":
    main()

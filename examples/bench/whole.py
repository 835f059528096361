"""Measures a step with Muon on whole matrices, beside one process, DDP and torch's Muon over FSDP2's DTensors.

python examples/bench/whole.py [--network 1gbit] [--ranks 2] [--rounds 9] [--blocks 2] [--width 512]

All contestants run in the same processes, on gloo, alternately; AdamW steps what is no matrix of a block. A network
with a rate needs root (network.py). A cell is the median over rounds, of the slowest rank, with the quartiles. Rank 0
counts the bytes that it sends. Then the FLOPs of orthogonalising on the busiest rank, counted as torch dispatches them,
for 1 to 8 ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import thunder_zero as tz  # before thunder
from examples.bench.model import Size, loss_of, make_batch, make_model
from examples.bench.network import LOOPBACK, bytes_sent, seats
from thunder_zero.plan.owners import Piece, assign, work_of_shape

import thunder

MATRICES = ("blocks.*.weight",)  # of two dimensions
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

    def ours(stage: int, owned: tuple[str, ...] = ()) -> Timed:
        model = thunder.jit(make_model(size), transforms=[tz.ZeroTransform(tz.Policy(stage, owned=owned))])
        return timed(model, size, rank, partial(tz.whole, optim.Muon))

    theirs = make_model(size)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    return {
        "one process": timed(make_model(size), size, rank, optim.Muon),
        "torch's DDP": timed(DistributedDataParallel(make_model(size)), size, rank, optim.Muon),
        "ZeRO-1, tz.whole": ours(1),
        "ZeRO-1, owned": ours(1, MATRICES),
        "ZeRO-2, tz.whole": ours(2),
        "ZeRO-2, owned": ours(2, MATRICES),
        "ZeRO-3, tz.whole": ours(3),
        "ZeRO-3, owned": ours(3, MATRICES),
        "FSDP2, Muon on DTensors": timed(theirs, size, rank, optim.Muon),
    }


def measure(options: argparse.Namespace, size: Size) -> None:
    """One rank; rank 0 writes seconds of a step, of its optimizers, and bytes, by contestant and round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, interface = dist.get_rank(), os.environ["GLOO_SOCKET_IFNAME"]
    shared = dist.get_world_size() if options.network == LOOPBACK else 1  # all ranks count on the one interface
    steps = contestants(size, rank)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for round_ in range(options.rounds + 2):
        for name, step in steps.items():
            before = bytes_sent(interface)
            seconds = torch.tensor(step())
            nbytes = (bytes_sent(interface) - before) / shared
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if round_ > 1:
                found[name].append((float(seconds[0]), float(seconds[1]), nbytes))
    if rank == 0:
        torch.save(found, options.found)
    dist.destroy_process_group()


def run(options: argparse.Namespace, found: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Measure in a process for each rank, on its place in the network."""
    with seats(options.ranks, options.network) as places:
        common = {"MASTER_ADDR": places[0].address, "MASTER_PORT": "29617", "WORLD_SIZE": str(options.ranks)}
        workers = [
            subprocess.Popen(
                [*seat.prefix, sys.executable, __file__, *sys.argv[1:], "--found", str(found)],
                env={**os.environ, **common, "RANK": str(rank), "GLOO_SOCKET_IFNAME": seat.interface},
            )
            for rank, seat in enumerate(places)
        ]
        try:
            if any([worker.wait() for worker in workers]):
                raise SystemExit("a rank failed; its error is above")
        finally:
            for worker in workers:
                worker.kill()
    measured: dict[str, list[tuple[float, float, float]]] = torch.load(found)
    return measured


def cell(values: Sequence[float]) -> str:
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
    parser.add_argument("--network", default=LOOPBACK, help="loopback, or a rate such as 1gbit")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = Size(options.blocks, options.width)
    if options.found:
        measure(options, size)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = run(options, Path(folder) / "found.pt")
    model = sum(4 * param.numel() for param in make_model(size).parameters())
    print(f"{size.blocks} blocks of width {size.width}, {options.ranks} ranks, {options.network}\n")
    print("| | step, ms | its optimizers, ms | bytes, of the model's |\n| --- | --- | --- | --- |")
    for name, rounds in found.items():
        step, part, nbytes = zip(*rounds, strict=True)
        print(f"| {name} | {cell(step)} | {cell(part)} | {median(nbytes) / model:.2f} |")
    shapes = [tuple(param.shape) for param in matrices(make_model(Size()))[0]]
    alone = orthogonalising(shapes)
    print("\n| ranks | GFLOP of orthogonalising on the busiest one | of one process |\n| --- | --- | --- |")
    for ranks in range(1, 9):
        busiest = flops_of_busiest(shapes, ranks)
        print(f"| {ranks} | {busiest / 1e9:.1f} | {busiest / alone:.1%} |")


if __name__ == "__main__":
    main()

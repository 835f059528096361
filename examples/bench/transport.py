"""Compares the transport for gloo with torch's own collectives: time, and bytes on the wire.

    python examples/bench/transport.py                             loopback
    sudo .venv/bin/python examples/bench/transport.py --links loopback 1gbit --world-sizes 2 4

Starts the ranks by itself, one thread each, and prints figures of docs/performance.md. In each round every candidate
runs once; a time is that of the slowest rank. *Bare* is an exchange of the same number of bytes between existing
buffers, without any sum: the speed of the link.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from network import LOOPBACK, Seat, bytes_sent, can_limit, seats
from torch import Tensor

import thunder_zero  # noqa: F401  # first of its imports
from thunder_zero.comm import pairwise
from thunder_zero.comm.native import PerTensor
from thunder_zero.comm.pairwise import PairwiseGloo
from thunder_zero.plan import layout

KiB, MiB = 1 << 10, 1 << 20
SECONDS = 600  # for one world on one link
BLOCK = 512  # width of the GPT block
CASES = {
    "one tensor of 16 MiB": [(4096, 1024)],
    "a GPT block, 12 tensors": [
        *[(BLOCK,)] * 4,
        *[(3 * BLOCK, BLOCK), (3 * BLOCK,), (BLOCK, BLOCK), (BLOCK,)],
        *[(4 * BLOCK, BLOCK), (4 * BLOCK,), (BLOCK, 4 * BLOCK), (BLOCK,)],
    ],
}
COLLECTIVES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}  # -> bytes sent, in (W - 1) / W of the tensors
PACKED_TENSORS = 16
MESSAGE_BYTES = (4 * KiB, 32 * KiB, 64 * KiB, 128 * KiB, 256 * KiB, 512 * KiB)
ALWAYS, NEVER = 1 << 40, 0  # values of PACK_BELOW_BYTES

Shape = tuple[int, ...]
Run = Callable[[], object]


# A rank.


@dataclass(frozen=True)
class Job:
    """The arguments of one rank."""

    rank: int
    world_size: int
    interface: str
    store: str
    rounds: int


class Rank:
    """One process of the world."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(job.rank)
        os.environ["GLOO_SOCKET_IFNAME"] = job.interface
        dist.init_process_group("gloo", init_method=f"file://{job.store}", rank=job.rank, world_size=job.world_size)
        self.job = job
        self.group = dist.group.WORLD
        self.peers = [rank for rank in range(job.world_size) if rank != job.rank]
        self.counts_bytes = not job.interface.startswith("lo")  # all ranks share the loopback interface

    def measure(self, candidates: dict[str, Run]) -> dict[str, dict[str, float]]:
        """Milliseconds (median and quartiles, of the slowest rank) and bytes sent (median, of the busiest)."""
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        sent: dict[str, list[int]] = {name: [] for name in candidates}
        for _ in range(1 + self.job.rounds):
            for name, run in candidates.items():
                dist.barrier()
                before, start = self.bytes_sent(), time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
                dist.barrier()  # now all that this rank sent has arrived
                sent[name].append(self.bytes_sent() - before)
        ranks: list[Any] = [None] * self.job.world_size
        dist.all_gather_object(ranks, (seconds, sent))  # [rank] -> (seconds, sent); the first round warms up
        return {
            name: _summary([times[name][1:] for times, _ in ranks], [counts[name][1:] for _, counts in ranks])
            for name in candidates
        }

    def bytes_sent(self) -> int:
        return bytes_sent(self.job.interface) if self.counts_bytes else 0

    def bare(self, nbytes: int) -> Run:
        """Sends and receives ``nbytes`` in total, spread over the peers."""
        out, into = ([torch.zeros(nbytes // len(self.peers), dtype=torch.uint8) for _ in self.peers] for _ in range(2))

        def run() -> None:
            works = [dist.irecv(slot, src=peer) for slot, peer in zip(into, self.peers, strict=True)]
            works += [dist.isend(message, dst=peer) for message, peer in zip(out, self.peers, strict=True)]
            for work in works:
                work.wait()  # type: ignore[union-attr]

        return run

    def case(self, shapes: Sequence[Shape]) -> dict[str, Any]:
        """All three collectives of tensors of these shapes, by our transport and by torch's."""
        world = self.job.world_size
        fulls = [torch.randn(shape) for shape in shapes]
        shards = [torch.randn(layout.shard_shape(shape, world)) for shape in shapes]
        candidates: dict[str, Run] = {}
        floors = {}
        for collective, times in COLLECTIVES.items():
            tensors = shards if collective == "all_gather" else fulls
            for name, transport in (("ours", PairwiseGloo(self.group)), ("torch", PerTensor(self.group))):
                candidates[f"{collective} {name}"] = _collective(transport, collective, tensors, shapes)
            floors[collective] = times * (world - 1) * sum(full.nbytes for full in fulls) // world
            candidates[f"{collective} bare"] = self.bare(floors[collective])
        return {"floors": floors, "figures": self.measure(candidates)}

    def packing(self, message_bytes: int) -> dict[str, dict[str, float]]:
        """A bucket of small tensors, each message to a peer of ``message_bytes``: separate, and packed into one."""
        rows = message_bytes // 256
        shapes = [(rows * self.job.world_size, 64)] * PACKED_TENSORS  # float32: 256 bytes a row
        transport = PairwiseGloo(self.group)
        tensors = {
            "all_gather": [torch.randn(rows, 64) for _ in shapes],
            "reduce_scatter": [torch.randn(shape) for shape in shapes],
        }
        candidates = {}
        for collective, inputs in tensors.items():
            run = _collective(transport, collective, inputs, shapes)
            candidates[f"{collective} separate"] = _packing_below(NEVER, run)
            candidates[f"{collective} packed"] = _packing_below(ALWAYS, run)
        return self.measure(candidates)


def _collective(transport: Any, collective: str, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Run:
    launch, given = getattr(transport, collective), (shapes,) if collective == "all_gather" else ()
    return lambda: launch(tensors, *given).wait()


def _packing_below(nbytes: int, run: Run) -> Run:
    def packing() -> None:
        usual, pairwise.PACK_BELOW_BYTES = pairwise.PACK_BELOW_BYTES, nbytes
        run()
        pairwise.PACK_BELOW_BYTES = usual

    return packing


def _summary(seconds: Sequence[Sequence[float]], sent: Sequence[Sequence[int]]) -> dict[str, float]:
    rounds = [max(ranks) * 1e3 for ranks in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return {"ms": middle, "low": low, "high": high, "bytes": max(map(statistics.median, sent))}


def rank_main(job: Job) -> None:
    """Measure; rank 0 prints the results as JSON."""
    rank = Rank(job)
    figures = {
        "cases": {label: rank.case(shapes) for label, shapes in CASES.items()},
        "packing": {size: rank.packing(size) for size in MESSAGE_BYTES} if not rank.counts_bytes else {},
    }
    dist.barrier()
    dist.destroy_process_group()
    if job.rank == 0:
        print(json.dumps(figures))


# All of them.


def run_world(world_size: int, link: str, rounds: int) -> dict[str, Any]:
    """The results that rank 0 prints; ends all ranks if one fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder, seats(world_size, link) as places:
        jobs = [Job(rank, world_size, place.interface, f"{folder}/store", rounds) for rank, place in enumerate(places)]
        ranks = [_start(job, place) for job, place in zip(jobs, places, strict=True)]
        try:
            printed, _ = ranks[0].communicate(timeout=SECONDS)
            failed = [rank for rank, process in enumerate(ranks) if process.wait(timeout=SECONDS)]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed:
        raise SystemExit(f"transport: rank {failed[0]} of {world_size} on {link} failed; see its error above")
    return json.loads(printed)


def _start(job: Job, seat: Seat) -> subprocess.Popen[str]:
    command = [*seat.prefix, sys.executable, "-W", "ignore", __file__, "--job", json.dumps(vars(job))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE if job.rank == 0 else subprocess.DEVNULL
    )


def case_table(label: str, by_world: dict[int, Any]) -> str:
    """Times of one case; if bytes on the wire were counted, also the MiB that a rank sent, and the minimum."""
    heads = ["W", "collective", "ours, ms", "torch, ms", "bare, ms"]
    rows, counted = [], False
    for world, figures in by_world.items():
        case = figures["cases"][label]
        for name in COLLECTIVES:
            found = [case["figures"][f"{name} {who}"] for who in ("ours", "torch", "bare")]
            counted = any(figure["bytes"] for figure in found)
            sent = [figure["bytes"] for figure in found[:2]] + [case["floors"][name]] if counted else []
            rows.append([str(world), name, *map(_spread, found), *(f"{nbytes / MiB:.2f}" for nbytes in sent)])
    return _table(heads + ["ours, MiB sent", "torch, MiB sent", "least, MiB"] * counted, rows)


def packing_table(by_world: dict[int, Any]) -> str:
    """Times of a bucket of small tensors, separate and packed."""
    names = [f"{collective} {how}" for collective in ("all_gather", "reduce_scatter") for how in ("separate", "packed")]
    heads = ["W", "bytes to a peer", *(f"{name}, ms" for name in names)]
    rows = [
        [str(world), f"{PACKED_TENSORS} x {int(size) // KiB} KiB", *(_spread(figures[name]) for name in names)]
        for world, result in by_world.items()
        for size, figures in result["packing"].items()
    ]
    return _table(heads, rows)


def _spread(figure: dict[str, float]) -> str:
    digits = 2 if figure["ms"] < 10 else 1 if figure["ms"] < 100 else 0
    middle, low, high = (f"{figure[key]:.{digits}f}" for key in ("ms", "low", "high"))
    return f"{middle} ({low}-{high})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", nargs="+", default=[LOOPBACK], help="loopback, or rates such as 1gbit (as root)")
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4], help="numbers of ranks, 2 or more")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each candidate, 2 or more")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the arguments of one rank
    options = parser.parse_args(argv)
    if options.job:
        rank_main(Job(**json.loads(options.job)))
        return
    if min(options.world_sizes) < 2 or options.rounds < 2:
        parser.error("give world sizes and rounds of 2 or more")
    if not can_limit() and options.links != [LOOPBACK]:
        parser.error(f"{', '.join(options.links)}: a link with a rate needs Linux, root, ip and tc")
    print(f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, Python {platform.python_version()}, ", end="")
    print(f"{os.cpu_count()} cores, one thread a rank; median of {options.rounds} rounds (quartiles)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and namespaces are removed, too
    for link in options.links:
        by_world = {world: run_world(world, link, options.rounds) for world in options.world_sizes}
        for label in CASES:
            print(f"\n{link}, {label}\n\n{case_table(label, by_world)}")
        if link == LOOPBACK:
            print(f"\n{link}, {PACKED_TENSORS} small tensors, separate and packed\n\n{packing_table(by_world)}")


if __name__ == "__main__":
    main()

"""Compares ``thunder.jit`` with and without ZeRO-3 on one rank: time to compile, and host time of each step.

    python examples/bench/overhead.py compile                          the GPT of the bench
    python examples/bench/overhead.py compile --blocks 6 12 24         how it grows, in narrow models
    python examples/bench/overhead.py passes                           the passes on 10,000 operations (needs `tests/`)

``run.py`` runs the first one itself. Without the transform, Thunder captures the module; with it, dynamo does. Both
compilations take turns, also in which starts, each from a collected heap.

Two random effects move a compilation by several percent each, with or without the transform: its depth in CPython's
stack (calls that cross into the next chunk of the stack cost an mmap and a page fault) and the size of the heap
(whether one more full collection is due). So each round has a different depth and heap, and the mean is reported.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn

import thunder_zero as tz  # before thunder
from examples.bench.contestants import trains
from examples.bench.model import Size, make_batch, make_model
from thunder_zero.schedule import passes

import thunder

COMPILES = 8  # even, so that each variant starts equally many rounds
FRAMES = 15  # each round starts this much deeper than the previous one
HOST_STEPS = 100
VARIANTS: dict[str, Callable[[], list[Any]]] = {"plain": list, "zero3": lambda: [tz.ZeroTransform(stage=3)]}


def compile_times(size: Size, rounds: int = COMPILES) -> dict[str, Any]:
    """Wall and CPU seconds from ``thunder.jit`` to the end of the first step, in turn without and with ZeRO-3."""
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    cpu: dict[str, list[float]] = {name: [] for name in VARIANTS}
    tiny = replace(size, blocks=1, width=size.heads)
    for transforms in VARIANTS.values():
        compile_and_step(make_model(tiny), transforms(), tiny)  # pays one-time costs
    for number in range(rounds):
        for name in sorted(VARIANTS, reverse=number % 2 == 1):
            module, transforms = make_model(size), VARIANTS[name]()
            gc.collect()
            ballast: list[list[None]] = [[] for _ in range(len(gc.get_objects()) * number // (4 * rounds))]
            gc.collect()
            start = time.perf_counter(), time.process_time()
            deeper(FRAMES * number, compile_and_step, module, transforms, size)
            seconds[name].append(time.perf_counter() - start[0])
            cpu[name].append(time.process_time() - start[1])
            del ballast
    return {"seconds": seconds, "cpu": cpu}


def deeper(frames: int, call: Callable[..., None], *args: Any) -> None:
    """Call it this many frames deeper in the stack."""
    if frames:
        deeper(frames - 1, call, *args)
    else:
        call(*args)


def compile_and_step(module: nn.Module, transforms: list[Any], size: Size) -> None:
    take_step(thunder.jit(module, transforms=transforms), size)


def take_step(model: nn.Module, size: Size) -> None:
    trains(model)[1](*make_batch(size, 0))


def host_times(size: Size) -> dict[str, Any]:
    """Seconds of a step, alternately without and with ZeRO-3: of the model, and of a narrow one bound by the host."""
    narrow = replace(size, width=size.heads, vocabulary=16, tokens=2, sequences=1)
    return {name: step_times(of, steps) for name, of, steps in (("full", size, 20), ("narrow", narrow, HOST_STEPS))}


def step_times(size: Size, count: int) -> dict[str, list[float]]:
    steps = {name: trains(thunder.jit(make_model(size), transforms=make()))[1] for name, make in VARIANTS.items()}
    batch = make_batch(size, 0)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(count + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            if number >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def added(seconds: dict[str, list[float]], average: Callable[[list[float]], float] = median) -> float:
    """The extra time with the transform, as a fraction of the time without.

    >>> added({"plain": [1.0, 2.0, 3.0], "zero3": [2.0, 2.2, 9.0]})
    0.1
    """
    plain, zero = (average(seconds[name]) for name in VARIANTS)
    return round(zero / plain - 1, 4)


def compile_sentence(measured: dict[str, Any]) -> str:
    """One sentence with the results of ``compile_times``."""
    plain, zero = (fmean(measured["seconds"][name]) for name in VARIANTS)
    return (
        f"First step with compilation: {plain:.2f} s without the transform, {zero:.2f} s with ZeRO-3 "
        f"({added(measured['seconds'], fmean):+.1%}; in CPU time {added(measured['cpu'], fmean):+.1%})."
    )


def summary(overhead: dict[str, Any]) -> list[str]:
    """Sentences with the results of ``compile_times`` and ``host_times``."""
    sentences = [compile_sentence(overhead["compile"])]
    for name, steps in overhead["host"].items():
        plain, zero = median(steps["plain"]), median(steps["zero3"])
        sentences.append(
            f"A step at W = 1, {name} model: {plain * 1e3:.2f} ms without the transform, {zero * 1e3:.2f} ms "
            f"with ZeRO-3 ({added(steps):+.1%})."
        )
    return sentences


def passes_sentence(operations: int = 10_000, repeats: int = 5) -> str:
    """The time of all passes and checks on a GPT's timeline of at least this many operations."""
    from tests.harness.timelines import gpt

    policy, layers = tz.ZERO3, 1
    while len((timeline := gpt(layers, policy)).ops) < operations:
        layers += 1
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        passes.run(timeline)
        seconds.append(time.process_time() - start)
    return f"Passes and checks on {len(timeline.ops):,} operations ({layers} blocks): {median(seconds):.2f} s of CPU."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "passes"))
    parser.add_argument("--blocks", type=int, nargs="+", help="measure narrow models with these numbers of blocks")
    parser.add_argument("--rounds", type=int, default=COMPILES, help="compilations of each variant")
    options = parser.parse_args()
    if options.what == "passes":
        print(passes_sentence())
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    narrow = Size(width=64, heads=2, vocabulary=64, sequences=1, tokens=16)
    for size in [replace(narrow, blocks=blocks) for blocks in options.blocks] if options.blocks else [Size()]:
        print(f"{size.blocks} blocks, width {size.width}. {compile_sentence(compile_times(size, options.rounds))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Measures what a batch of a new length costs: a small Llama (examples/llama.py), ten lengths, one rank.

    python -m examples.bench.changing_shapes

Seconds of a step (forward and backward) with the first length, of one with each further length (their median, and this
package's share of it), and of one with a length that was there before. docs/zoo.md has the table.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thunder_zero as tz  # before thunder
from examples.bench.families import WORDS, text
from examples.bench.overhead import clocked
from examples.llama import Llama, LlamaConfig
from thunder_zero.frontends.program_transform import JointPass, ProgramTransform

import thunder

LENGTHS = range(12, 22)
OURS: tuple[tuple[type, str], ...] = (  # our functions that Thunder calls for each program
    (ProgramTransform, "transform_traces_pre_prologue"),
    (ProgramTransform, "transform_trace_post_optimization"),
    (JointPass, "fusion_pass"),
)
FRONT_ENDS: dict[str, Callable[[nn.Module], Any]] = {
    "`thunder.jit` alone": thunder.jit,
    "`thunder.jit`, `ZeroTransform(stage=3)`": lambda module: thunder.jit(
        module, transforms=[tz.ZeroTransform(stage=3)]
    ),
    "`tz.compile(stage=3)`": lambda module: tz.compile(module, stage=3),
}


def seconds(front_end: Callable[[nn.Module], Any]) -> tuple[float, float, float, float]:
    """Of a step: with the first length; with a new one, and what this package takes of it; with a known one."""
    torch.manual_seed(0)
    model = front_end(Llama(LlamaConfig(WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=1)))

    def step(length: int) -> tuple[float, float]:
        batch = text(length)
        spent: dict[str, float] = {}
        start = time.perf_counter()
        with clocked(spent, OURS):
            model(**batch).loss.backward()
        return time.perf_counter() - start, sum(spent.values())

    first, *others = [step(length) for length in LENGTHS]
    known = [step(length)[0] for length in LENGTHS]
    return first[0], median(total for total, _ in others), median(ours for _, ours in others), median(known)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for front_end in FRONT_ENDS.values():  # pays one-time costs
        front_end(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
    print("| seconds of a step | first length | a new length | of that, this package | a known length |")
    print("|---|---:|---:|---:|---:|")
    for name, front_end in FRONT_ENDS.items():
        print("|", " | ".join((name, *(f"{value:.3f}" for value in seconds(front_end)))), "|", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

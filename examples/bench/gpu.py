"""A step on one GPU as rank 0 of 8: what the host does, what is allocated, and the peak; ours and FSDP2, in turn.

    python examples/bench/gpu.py                       # ./dev gpu runs tests/gpu first, and has both in one report
    python examples/bench/gpu.py --device cpu --tiny   # rehearses this without a GPU; its times mean nothing

A Llama-like stack in bfloat16. The fake backend stands in for NCCL with 8 ranks: kernels, memory and the host's work
are those of a rank of 8, but nothing travels and gathered numbers are not those of a training. So no loss is compared
here, and times have no communication in them.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import thunder_zero as tz

WORLD_SIZE, MiB = 8, 1 << 20
WARM_UP, ROUNDS = 3, 20
Step = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Size:
    """Sizes of the model and of the rank's batch."""

    blocks: int = 16
    width: int = 2048
    heads: int = 16
    hidden: int = 5632
    vocabulary: int = 32000
    tokens: int = 2048


TINY = Size(blocks=2, width=16, heads=2, hidden=24, vocabulary=32, tokens=8)


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Block(nn.Module):
    """Attention without positions, then SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm, self.mlp_norm = Norm(size.width), Norm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.gate, self.up = (nn.Linear(size.width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).split(width, dim=-1)
        q, k, v = (t.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Stack(nn.Module):
    """Llama without its rotary embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = Norm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def trains(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def policy(stage: int) -> tz.Policy:
    return tz.Policy(stage=stage, mixed_precision=tz.MixedPrecision(torch.bfloat16, torch.float32))


def ours(stage: int, **options: Any) -> Callable[[Size, str], Step]:
    def build(size: Size, device: str) -> Step:
        return trains(tz.compile(Stack(size), policy(stage), device=torch.device(device), **options))

    return build


def fsdp2(compiled: bool) -> Callable[[Size, str], Step]:
    def build(size: Size, device: str) -> Step:
        mesh = init_device_mesh(device, (WORLD_SIZE,))
        options: Any = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
        model = Stack(size).to(device)
        for block in model.blocks:
            fully_shard(block, **options)
            if compiled:
                block.compile()
        fully_shard(model, **options)
        return trains(model)

    return build


CONTESTANTS: dict[str, Callable[[Size, str], Step]] = {
    "zero2": ours(2),
    "zero3": ours(3),
    "zero3, inductor": ours(3, fuse="inductor"),
    "fsdp2": fsdp2(compiled=False),
    "fsdp2, compiled": fsdp2(compiled=True),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One step.

    Attributes:
        host: seconds until the step returns; the device may still compute.
        whole: seconds until the device has ended.
        allocations: blocks that the allocator gave; None on the CPU.
        peak: most bytes allocated, without those of others; None on the CPU.
    """

    host: float
    whole: float
    allocations: int | None
    peak: int | None


def measure(step: Step, tokens: Tensor, others: int) -> Measured:
    """Take one step. ``others``: bytes on the device that are not this contestant's."""
    on_gpu = tokens.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
    start = time.perf_counter()
    step(tokens)
    host = time.perf_counter() - start
    if not on_gpu:
        return Measured(host, host, None, None)
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    given = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    return Measured(host, whole, given, torch.cuda.max_memory_allocated() - others)


@dataclass(slots=True)
class Contestant:
    """One that takes its turn.

    Attributes:
        step: takes a step.
        rest: bytes that are its own between two steps; 0 on the CPU.
        steps: what was measured.
    """

    step: Step
    rest: int
    steps: list[Measured] = field(default_factory=list)


def built(name: str, size: Size, tokens: Tensor) -> Contestant:
    """A contestant that has warmed up."""
    start, before = time.perf_counter(), allocated(tokens)
    torch.manual_seed(0)
    step = CONTESTANTS[name](size, tokens.device.type)
    for _ in range(WARM_UP):
        step(tokens)
    gc.collect()
    print(f"{name}: ready after {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return Contestant(step, allocated(tokens) - before)


def allocated(tensor: Tensor) -> int:
    """Bytes in use on the device of ``tensor``."""
    return torch.cuda.memory_allocated() if tensor.is_cuda else 0


def in_turn(names: Sequence[str], size: Size, device: str, rounds: int) -> dict[str, Contestant]:
    """Steps of all contestants, one after the other in each round. Peaks are without what belongs to the others."""
    tokens = torch.randint(size.vocabulary, (1, size.tokens + 1), device=device)
    found = {name: built(name, size, tokens) for name in names}
    rest = sum(contestant.rest for contestant in found.values())
    for number in range(rounds):
        for name in sorted(names, reverse=number % 2 == 1):
            gc.collect()
            one = found[name]
            one.steps.append(measure(one.step, tokens, rest - one.rest))
    return found


def table(found: dict[str, Contestant]) -> list[str]:
    """Medians, as lines of Markdown."""
    lines = ["| | host ms | step ms | allocations | peak MiB |", "| --- | --- | --- | --- | --- |"]
    for name, contestant in found.items():
        steps = contestant.steps
        allocations, peak = steps[-1].allocations, steps[-1].peak
        cells = [
            f"{median(step.host for step in steps) * 1e3:.2f}",
            f"{median(step.whole for step in steps) * 1e3:.2f}",
        ]
        cells += ["-" if allocations is None else str(allocations), "-" if peak is None else f"{peak / MiB:.0f}"]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return lines


def tests_section(xml: Path) -> list[str]:
    """The outcome of tests/gpu, from pytest's JUnit file: counts, and every test that did not pass."""
    cases = list(ElementTree.parse(xml).getroot().iter("testcase"))
    bad = {id(case): child for case in cases for child in case if child.tag in ("failure", "error", "skipped")}
    lines = ["", f"## Tests: {len(cases) - len(bad)} of {len(cases)} passed", ""]
    for case in cases:
        if id(case) in bad:
            child = bad[id(case)]
            message = (child.get("message") or "").partition("\n")[0][:200]
            lines.append(f"- {child.tag}: `{case.get('classname')}::{case.get('name')}` {message}")
    return lines


def report(options: argparse.Namespace) -> list[str]:
    size = TINY if options.tiny else Size()
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {platform.machine()}: a rehearsal"
    found = in_turn(options.contestants, size, options.device, options.rounds)
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return [
        "# thunder_zero on a GPU",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {where}, {versions}",
        "",
        f"## A step as rank 0 of {WORLD_SIZE}: {size}",
        "",
        f"bfloat16, AdamW, fake backend: nothing travels. Medians of {options.rounds} steps, in turn.",
        "",
        *table(found),
        *(tests_section(options.tests) if options.tests is not None and options.tests.exists() else []),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--tests", type=Path, help="the JUnit file of tests/gpu, for the report")
    parser.add_argument("--report", type=Path, help="write the report to this file, too")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device here; rehearse with --device cpu --tiny", file=sys.stderr)
        return 1
    dist.init_process_group("fake", rank=0, world_size=WORLD_SIZE)
    try:
        text = "\n".join(report(options)) + "\n"
    finally:
        dist.destroy_process_group()
    print(text)
    if options.report is not None:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures attention on the CPU in a GPT: as one line each way, decomposed by Thunder, and in eager torch.

OMP_NUM_THREADS=1 python -m examples.bench.attention
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import thunder_zero as tz  # before thunder
from examples.bench.model import Size, loss_of, make_batch, make_model
from examples.tensor_memory import added_at_peak, bytes_held

import thunder
from thunder.executors.torch_compile import torch_compile_ex

SMALL, LONG = (Size(blocks=4, width=256, heads=4, vocabulary=256, tokens=tokens) for tokens in (128, 512))
FUSED: dict[str, Any] = {"executors": [torch_compile_ex]}
ROWS: dict[str, tuple[Size, dict[str, Any]]] = {
    "4 blocks, width 256, 128 tokens": (SMALL, {}),
    "the same with 512 tokens": (LONG, {}),
    "128 tokens, `torch_compile_ex`": (SMALL, FUSED),
    "512 tokens, `torch_compile_ex`": (LONG, FUSED),
    "the bench's GPT": (Size(), {}),
}


def measured(model: nn.Module, size: Size, kernel: SDPBackend) -> str:
    """MiB that forward and the loss save for backward, without parameters; most MiB that a step adds to those."""
    tokens, targets = make_batch(size, rank=0)
    kept: list[Tensor] = list(model.parameters())
    at_rest = bytes_held(kept)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one), one)[1], lambda one: one)
    with sdpa_kernel(kernel), hooks:
        loss_of(model(tokens), targets).backward()  # the first call compiles
    saved = bytes_held(kept) - at_rest
    kept.clear()
    model.zero_grad()
    peak = added_at_peak(lambda: loss_of(model(tokens), targets).backward(), tokens.device)
    return f"{saved / 2**20:.1f}, {peak / 2**20:.1f}"


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| model, executors | one line: saved, peak | decomposed: saved, peak | eager: saved, peak |")
    print("| --- | --- | --- | --- |")
    for name, (size, options) in ROWS.items():
        ours = [thunder.jit(make_model(size), transforms=[tz.ZeroTransform(tz.DDP)], **options) for _ in range(2)]
        kernels = (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
        models = zip((*ours, make_model(size)), kernels, strict=True)
        found = [measured(model, size, kernel) for model, kernel in models]
        print("|", " | ".join([name, *found]), "|", flush=True)
    print(f"\ntorch {torch.__version__}, Thunder {thunder.__version__}.")

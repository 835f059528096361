"""Prints the timelines of several programs; run as a program, under a hash seed of its own.

``python -m tests.harness.hash_seeds`` prints one line for each operation of each program.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.program_transform import schedule_lines

from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import add_default_executor

WIDTH, TOKENS = 8, 3
Pair = tuple[Tensor, Tensor | None]


class Layer(nn.Module):
    """Attention as in T5, to itself or to a memory; changes its scores in place by a bias that other layers take on."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.bias = nn.Embedding(5, 1) if biased else None

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None = None) -> Pair:
        y = self.norm.forward(x)
        memory = y if memory is None else memory
        scores = self.q.forward(y) @ self.k.forward(memory).transpose(-1, -2)
        if self.bias is not None:
            places = torch.arange(TOKENS)[None] - torch.arange(TOKENS)[:, None]
            bias = self.bias.forward(places + 2).squeeze(-1)
        if bias is not None:
            scores += bias
        return x + F.softmax(scores.float(), -1).type_as(scores) @ self.v.forward(memory), bias


class T5(nn.Module):
    """Encoder and decoder with one embedding, which is the head as well. Asks its first parameter for the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleList([Layer(biased=True), Layer(biased=False)])
        self.decoder = Layer(biased=False)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        embedded = self.shared.forward(tokens).to(next(self.parameters()).dtype)
        memory, bias = embedded, None
        for layer in self.encoder:
            memory, bias = layer.forward(memory, bias)
        y, _ = self.decoder.forward(embedded, None, memory)
        return {"logits": self.head.forward(y), "more": (memory, [memory * 2])}


class Loop(nn.Module):
    """Reads its parameters and buffers by the methods that list them; and a product of several parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("d", torch.ones(4))
        self.register_buffer("e", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x * next(self.b.parameters()).sum()
        for name, param in self.named_parameters(prefix="model"):
            x = (x + param.sum()) * len(name)
        for buffer in self.buffers():
            x = (x + 1) * buffer
        return x @ torch.tanh(self.a.weight * self.b.weight * self.c.weight)


class InPlace(nn.Module):
    """Changes values in place that have views."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        copies = [(w * 2).transpose(0, 1) for w in self.ws]
        for copy in copies:
            copy += x
        return copies[0] * copies[1] + copies[2] * copies[3]


def main() -> None:
    """What backward computes again of T5, a fuser decides."""
    for module in (Loop(), InPlace()):
        show(module, torch.ones(4), tz.Policy(stage=3, bucket_bytes=1, gather_last_units_once=False))
    add_default_executor(torch_compile_ex)
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    parts = tz.Policy(stage=3, bucket_bytes=300, mixed_precision=half, gather_per_unit=True)
    show(T5(), torch.arange(2 * TOKENS).view(2, TOKENS), parts)


def show(module: nn.Module, x: Tensor, policy: tz.Policy) -> None:
    timeline = tz.trace(module, x, policy=policy, world_size=3).timeline
    for line in (*schedule_lines(timeline, False), *schedule_lines(timeline, True)):
        print(f"{type(module).__name__}: {line}")


if __name__ == "__main__":
    main()

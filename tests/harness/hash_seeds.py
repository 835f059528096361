"""Prints the timelines of several architectures; run as a program, under a hash seed of its own.

``python -m tests.harness.hash_seeds`` prints one line for each operation of each program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thunder_zero as tz
from thunder_zero.program_transform import schedule_lines

from thunder.executors.torch_compile import torch_compile_ex
from thunder.extend import add_default_executor

WIDTH, TOKENS = 8, 3


class Attention(nn.Module):
    """Attention as in T5, to itself or to a memory; scores change in place."""

    def __init__(self, *, biased: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.bias = nn.Embedding(5, 1) if biased else None

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        if self.bias is not None:
            places = torch.arange(TOKENS)[None] - torch.arange(TOKENS)[:, None]
            bias = self.bias(places + 2).squeeze(-1)
        if bias is not None:
            scores += bias
        return F.softmax(scores.float(), -1).type_as(scores) @ self.v(memory), bias


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder if it is given a memory."""

    def __init__(self, *, first: bool, decodes: bool) -> None:
        super().__init__()
        self.own = Attention(biased=first)
        self.norm = nn.LayerNorm(WIDTH)
        self.cross = Attention(biased=False) if decodes else None

    def forward(self, x: Tensor, bias: Tensor | None, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y, bias = self.own(self.norm(x), self.norm(x), bias)
        if self.cross is not None:
            y = y + self.cross(y, memory, None)[0]
        return x + y, bias


class Stack(nn.Module):
    """Layers that share the first one's bias. Like Hugging Face's, it asks its first parameter for the dtype."""

    def __init__(self, embed: nn.Embedding, *, decodes: bool) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList([Layer(first=number == 0, decodes=decodes) for number in range(2)])

    def forward(self, tokens: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.embed(tokens).to(next(self.parameters()).dtype), None
        for layer in self.layers:
            x, bias = layer(x, bias, memory)
        return x


class T5(nn.Module):
    """Encoder and decoder with one embedding, which is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, WIDTH)
        self.encoder, self.decoder = Stack(self.shared, decodes=False), Stack(self.shared, decodes=True)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        memory = self.encoder(tokens)
        return {"logits": self.head(self.decoder(tokens, memory)), "more": (memory, [memory * 2])}


class Loop(nn.Module):
    """Reads its parameters and buffers by the methods that list them."""

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
        return x


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


def programs() -> Iterator[tuple[str, nn.Module, Tensor, tz.Policy]]:
    """Name, module, input and policy; the last one is to be fused."""
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    tokens = torch.arange(2 * TOKENS).view(2, TOKENS)
    parts = tz.Policy(stage=3, mixed_precision=half, gather_per_unit=True, bucket_bytes=300)
    yield "T5, mixed precision, gathered per unit", T5(), tokens, parts
    for module in (Loop(), InPlace()):
        yield f"{type(module).__name__}, stage 3", module, torch.ones(4), tz.Policy(stage=3, bucket_bytes=1)
    yield "T5, fused", T5(), tokens, tz.Policy(stage=3, bucket_bytes=600, gather_last_units_once=False)


def show(name: str, module: nn.Module, x: Tensor, policy: tz.Policy) -> None:
    timeline = tz.trace(module, x, policy=policy, world_size=3).timeline
    for line in (*schedule_lines(timeline, False), *schedule_lines(timeline, True)):
        print(f"{name}: {line}")


def main() -> None:
    *others, fused = programs()
    for program in others:
        show(*program)
    add_default_executor(torch_compile_ex)  # its fuser decides what backward computes again
    show(*fused)


if __name__ == "__main__":
    main()

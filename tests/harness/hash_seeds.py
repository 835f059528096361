"""Prints the timelines of several models. Tests run it under different hash seeds.

``python -m tests.harness.hash_seeds`` prints a line for each operation with parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import LENGTH, GptShape


class Loop(nn.Module):
    """Iterates over its parameters and buffers, and reads a product of several parameters."""

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
    """Updates values in place that have views."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        copies = [(w * 2).transpose(0, 1) for w in self.ws]
        for copy in copies:
            copy += x
        return copies[0] * copies[1] + copies[2] * copies[3]


def main() -> None:
    """Print three timelines. In the last one a fuser decides what backward recomputes."""
    for module in (Loop(), InPlace()):
        show(module, torch.ones(4), tz.Policy(stage=3, bucket_bytes=1, reshard_after_forward=True))
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    parts = tz.Policy(stage=3, bucket_bytes=300, mixed_precision=half, gather_per_unit=True)
    show(GptShape(), torch.arange(10).view(2, LENGTH), parts)


def show(module: nn.Module, x: Tensor, policy: tz.Policy) -> None:
    timeline = tz.trace(module, x, policy=policy, world_size=3).timeline
    for op in timeline.ops:
        if op.params:
            print(f"{type(module).__name__}: {op.kind} {', '.join(op.params)}")


if __name__ == "__main__":
    main()

"""A model with attention, convolutions, activations and norms, and the lines of traces that run torch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from thunder_zero.compat.thunder.operators.choose import executors_in_front

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

OURS = executors_in_front(())
FLASH, FLASH_BACKWARD, MASK_BACKWARD = (f"cpu_flash_attention{end}" for end in ("", "_backward", "_mask_backward"))
OF_INPUT, OF_WEIGHT = "convolution_input_gradient", "convolution_weight_gradient"
FEATURES = 8


class Attends(nn.Module):
    """A convolution, attention with two heads, an MLP, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, FEATURES, 3, padding=1)
        self.qkv, self.norm = nn.Linear(FEATURES, 3 * FEATURES), nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
        self.last = nn.ConvTranspose1d(FEATURES, FEATURES, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(self.first.forward(x).transpose(1, 2))
        x = F.softmax(self.down.forward(F.gelu(self.up.forward(self.norm.forward(x)))), -1)
        return self.last.forward(x.transpose(1, 2))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv.forward(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def our_lines(*traces: TraceCtx | None) -> Iterator[BoundSymbol]:
    for trace in traces:
        yield from (line for line in trace.bound_symbols if line.sym.executor in OURS) if trace else ()


def names_of_lines(*traces: TraceCtx | None) -> list[str]:
    return [line.sym.name for line in our_lines(*traces)]

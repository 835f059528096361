"""Measures what operators of torch allocate inside and show nobody: workspaces, which no forecast can see.

    python -m examples.bench.workspaces             # prints them; examples/bench/memory.py writes them into the page

Each operator of the models in ``cases.py`` runs once to warm up and once on one thread, with the allocator's record on.
Hidden is the most that is added at one time, less the operator's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.bench.cases import IMAGES, PIXELS, SEQUENCES, TOKENS, VOCABULARY
from examples.bench.memory_table import HIDING, Workspace, workspace_cells
from examples.tensor_memory import added_at_peak, bytes_held

CPU = torch.device("cpu")
WIDTH, HEADS = 512, 8  # of the bench's GPT
CONVOLUTIONS = (  # channels in and out, kernel, stride, pixels: those of the ResNet
    *((3, 64, 3, 1, PIXELS), (64, 64, 3, 1, PIXELS), (64, 64, 1, 1, PIXELS)),
    *((64, 128, 3, 2, PIXELS), (64, 128, 1, 2, PIXELS), (128, 128, 3, 1, PIXELS // 2)),
    *((128, 256, 3, 2, PIXELS // 2), (256, 256, 3, 1, PIXELS // 4)),
)
Operator = tuple[str, str, Callable[[], Any]]


def measured_workspaces() -> tuple[Workspace, ...]:
    """Those of all operators, in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return tuple(measure(*each) for each in (*convolutions(), *linears(), *attentions(), *others()))
    finally:
        torch.set_num_threads(threads)


def measure(name: str, inputs: str, run: Callable[[], Any]) -> Workspace:
    """One operator."""
    run()
    kept: list[Any] = []
    added = added_at_peak(lambda: kept.append(run()), CPU)
    results = kept if isinstance(kept[0], Tensor) else kept[0]
    shown = bytes_held(result for result in results if isinstance(result, Tensor))
    return Workspace(name, inputs, shown, added - shown)


def convolutions() -> Iterator[Operator]:
    """Forward and backward of each."""
    for inputs, outputs, kernel, stride, pixels in CONVOLUTIONS:
        x, weight = torch.randn(IMAGES, inputs, pixels, pixels), torch.randn(outputs, inputs, kernel, kernel)
        yield from convolution(x, weight, stride, kernel // 2)


def convolution(x: Tensor, weight: Tensor, stride: int, padding: int) -> Iterator[Operator]:
    def forward() -> Tensor:
        return F.conv2d(x, weight, None, stride, padding)

    gradient = torch.randn_like(forward())

    def backward() -> Any:
        sizes = ((stride, stride), (padding, padding), (1, 1), False, (0, 0), 1, (True, True, False))
        return torch.ops.aten.convolution_backward(gradient, x, weight, None, *sizes)

    words = f"{shape(x)}, weight {shape(weight)}, stride {stride}"
    yield "convolution", words, forward
    yield "convolution, backward", words, backward


def linears() -> Iterator[Operator]:
    """Products with weights of the GPT's blocks, in both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SEQUENCES, TOKENS, WIDTH, dtype=dtype)
        up, bias = torch.randn(4 * WIDTH, WIDTH, dtype=dtype), torch.randn(4 * WIDTH, dtype=dtype)
        head = torch.randn(VOCABULARY, WIDTH, dtype=dtype)
        y = torch.randn(SEQUENCES * TOKENS, 4 * WIDTH, dtype=dtype)
        kind = str(dtype).removeprefix("torch.")
        yield "linear", f"{kind} {shape(x)}, weight {shape(up)}, bias", lambda x=x, w=up, b=bias: F.linear(x, w, b)
        yield "linear", f"{kind} {shape(x)}, weight {shape(head)}", lambda x=x, w=head: F.linear(x, w)
        rows = x.flatten(0, 1)
        yield "matmul", f"{kind} {shape(y.t())}, {shape(rows)}", lambda y=y, x=rows: torch.matmul(y.t(), x)


def attentions() -> Iterator[Operator]:
    """torch's flash attention for CPUs, with the GPT's heads."""
    q = torch.randn(SEQUENCES, HEADS, TOKENS, WIDTH // HEADS)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, logsumexp = forward(q, q, q, 0.0, True)
    yield "flash attention", f"queries {shape(q)}", lambda: forward(q, q, q, 0.0, True)
    yield "flash attention, backward", f"queries {shape(q)}", lambda: backward(q, q, q, q, out, logsumexp, 0.0, True)


def others() -> Iterator[Operator]:
    """Operators of other classes."""
    x = torch.randn(SEQUENCES, TOKENS, WIDTH)
    pixels = torch.randn(IMAGES, 64, PIXELS, PIXELS)
    logits, tokens = torch.randn(SEQUENCES * TOKENS, VOCABULARY), torch.randint(VOCABULARY, (SEQUENCES, TOKENS))
    yield "embedding, backward", f"gradient {shape(x)}", lambda: embedding_backward(x, tokens)
    yield "gelu", shape(x), lambda: F.gelu(x)
    yield "softmax", shape(logits), lambda: torch.softmax(logits, -1)
    yield "sum of channels", shape(pixels), lambda: pixels.sum((0, 2, 3))
    yield "var_mean of channels", shape(pixels), lambda: torch.var_mean(pixels, (0, 2, 3), correction=0)


def embedding_backward(gradient: Tensor, tokens: Tensor) -> Any:
    return torch.ops.aten.embedding_backward(gradient, tokens, VOCABULARY, -1, False, False)


def shape(tensor: Tensor) -> str:
    """Such as "[2, 128, 512]"."""
    return str(list(tensor.shape))


def main() -> None:
    print("  ".join(HIDING))
    for one in measured_workspaces():
        print("  ".join(workspace_cells(one)))


if __name__ == "__main__":
    main()

"""needed while: torch's recurrent layers read the lengths of packed sequences as numbers.

Dynamo would end its graph there, and the layer would read parameters that nothing gathers. Inside a block, recurrent
layers put packed sequences through an operator, which dynamo and AOTAutograd do not trace into::

    data (words, features), batch_sizes (steps,)  ->  packed_layer  ->  data (words, width), last states

The operator computes one layer, in one or both directions. Its backward computes the layer again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from thunder_zero.compat.private import replaced

LAYER, BACKWARD = "thunder_zero::packed_layer", "thunder_zero::packed_layer_backward"
ARGS = "Tensor data, Tensor batch_sizes, Tensor[] states, Tensor[] weights, str mode, bool bias, bool bidirectional"
COMPUTE: dict[str, Any] = {"GRU": torch.gru, "LSTM": torch.lstm, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}

torch.library.define(LAYER, f"({ARGS}) -> Tensor[]")
torch.library.define(BACKWARD, f"(Tensor[] grads, {ARGS}) -> Tensor[]")


def _compute(args: Sequence[Any], training: bool) -> list[Tensor]:
    data, batch_sizes, states, weights, mode, bias, bidirectional = args
    states = states if mode == "LSTM" else states[0]
    return list(COMPUTE[mode](data, batch_sizes, states, weights, bias, 1, 0.0, training, bidirectional))


@torch.library.impl(LAYER, "CompositeExplicitAutograd")
def _layer(*args: Any) -> list[Tensor]:
    return _compute(args, training=False)


@torch.library.register_fake(LAYER)
def _shapes(data: Tensor, _: Tensor, states: Sequence[Tensor], *args: Any) -> list[Tensor]:
    width = states[0].shape[-1] * states[0].shape[0]  # the first dimension is the number of directions
    return [data.new_empty(data.shape[0], width), *map(torch.empty_like, states)]


@torch.library.impl(BACKWARD, "CompositeExplicitAutograd")
def _gradients(grads: Sequence[Tensor], *args: Any) -> list[Tensor]:
    data, batch_sizes, states, weights, *rest = args
    inputs = [tensor.detach().requires_grad_() for tensor in (data, *states, *weights)]
    data, parts = inputs[0], inputs[1:]
    with torch.enable_grad():
        outputs = _compute((data, batch_sizes, parts[: len(states)], parts[len(states) :], *rest), training=True)
    return list(torch.autograd.grad(outputs, inputs, grads))


@torch.library.register_fake(BACKWARD)
def _shapes_of_gradients(
    grads: Sequence[Tensor], data: Tensor, _: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], *args: Any
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in (data, *states, *weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    data, batch_sizes, states, weights, *ctx.rest = inputs
    ctx.count = len(states)
    ctx.save_for_backward(data, batch_sizes, *states, *weights)


def _backward(ctx: Any, grads: Sequence[Tensor]) -> tuple[Any, ...]:
    data, batch_sizes, *tensors = ctx.saved_tensors
    inputs = data, batch_sizes, tensors[: ctx.count], tensors[ctx.count :], *ctx.rest
    first, *others = torch.ops.thunder_zero.packed_layer_backward(grads, *inputs)
    return first, None, others[: ctx.count], others[ctx.count :], *(None for _ in ctx.rest)


torch.library.register_autograd(LAYER, _backward, setup_context=_keep)


def _forward(layers: Any, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    data, batch_sizes, order, inverse = packed
    layers.check_input(data, batch_sizes)
    is_lstm, directions = layers.mode == "LSTM", 2 if layers.bidirectional else 1
    if hx is None:
        count = _count(batch_sizes) if order is None else order.shape[0]
        widths = (layers.proj_size or layers.hidden_size, layers.hidden_size)
        zeros = [data.new_zeros(layers.num_layers * directions, count, width) for width in widths]
        hx = tuple(zeros) if is_lstm else zeros[0]
    else:
        hx = layers.permute_hidden(hx, order)
    states = [part.split(directions) for part in (hx if is_lstm else (hx,))]
    weights, last = layers._flat_weights, []
    each = len(weights) // layers.num_layers
    for index, inputs in enumerate(zip(*states, strict=True)):
        if index and layers.dropout:
            data = F.dropout(data, layers.dropout, layers.training)
        own = weights[index * each : (index + 1) * each]
        data, *outputs = torch.ops.thunder_zero.packed_layer(
            data, batch_sizes, list(inputs), own, layers.mode, layers.bias, layers.bidirectional
        )
        last.append(outputs)
    ends = tuple(torch.cat(parts) for parts in zip(*last, strict=True))
    return (
        PackedSequence(data, batch_sizes, order, inverse),
        layers.permute_hidden(ends if is_lstm else ends[0], inverse),
    )


@torch.compiler.disable
def _count(batch_sizes: Tensor) -> int:
    return int(batch_sizes[0])


def _with_packed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def packed_or_padded(self: Any, input: Any, hx: Any = None) -> Any:
        return _forward(self, input, hx) if isinstance(input, PackedSequence) else forward(self, input, hx)

    return packed_or_padded


FORWARDS: dict[Any, Callable[..., Any]] = {kind: _with_packed(kind.forward) for kind in (nn.GRU, nn.LSTM, nn.RNN)}


@contextmanager
def packed_as_operators() -> Iterator[None]:
    """Let recurrent layers of torch put packed sequences through the operator, inside the block."""
    with ExitStack() as stack:
        for kind, forward in FORWARDS.items():
            stack.enter_context(replaced(kind, "forward", forward))
        yield

"""Computes the gradients of a loss, and removes the operations of backward that they do not need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from thunder_zero.tools.forecast.run_lines import empty_like, filled
from thunder_zero.tools.forecast.watch import META, WithoutValues, needs_no_values
from thunder_zero.traces.compiled import Traces

from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map

Loss = Callable[[Any], Tensor]


def for_loss(traces: Traces, loss: Loss) -> Traces:
    """Return the traces for training with a loss, such as ``lambda output: output.loss``.

    A loss may ignore outputs of forward, such as logits. When a model runs, its backward skips operations that only
    ignored outputs need. Traces of a model that has not run still have these operations, and this function removes
    them.

    >>> traces = tz.tools.for_loss(tz.trace(model, tokens, labels=labels, policy=3), lambda output: output.loss)
    """
    if traces.backward is None:
        return traces
    returned = traces.forward.bound_symbols[-1]
    with WithoutValues():
        result = filled(returned.args[0], {proxy.name: empty_like(proxy) for proxy in returned.flat_proxy_args})
        gradients = gradients_of_loss(traces, [result["output"], list(result["flat_output"])], loss)
    unused = [proxy.name for proxy, gradient in zip(tangents_of(traces), gradients, strict=True) if gradient is None]
    return traces.without(unused) if unused else traces


def tangents_of(traces: Traces) -> list[TensorProxy]:
    return [proxy for proxy in traces.backward.args[1] if proxy is not None] if traces.backward is not None else []


def gradients_of_outputs(traces: Traces, returned: list[Any], loss: Loss | None) -> list[Tensor]:
    """Return the gradients of forward's outputs, as autograd materializes them; uninitialized without a loss."""
    if loss is None:
        assert traces.backward is not None
        pairs = zip(returned.pop(), traces.backward.args[1], strict=True)
        returned.clear()
        return [torch.empty_like(tensor) for tensor, proxy in pairs if proxy is not None]
    gradients = zip(tangents_of(traces), gradients_of_loss(traces, returned, loss), strict=True)
    return [torch.zeros_like(empty_like(proxy)) if grad is None else grad for proxy, grad in gradients]


class _LossInput(torch.autograd.Function):
    """Makes a differentiable alias of an output. Autograd can compute its gradient after the alias is dropped."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, output: Tensor) -> Tensor:
        return output.detach()


def gradients_of_loss(traces: Traces, result: list[Any], loss: Loss) -> Sequence[Tensor | None]:
    """Return the loss's gradients with respect to the outputs that train; None for an output that it does not use.

    ``result`` has forward's outputs, nested and flat. It is emptied when training code would drop forward's result.
    """
    output, flat = result
    result.clear()
    assert traces.backward is not None
    proxies = traces.backward.args[1]  # a proxy is None if its output has no gradient
    root = torch.empty(0, device=META, requires_grad=True)
    with torch.enable_grad():
        inputs = {
            id(tensor): _LossInput.apply(root, tensor)  # type: ignore[no-untyped-call]
            if tensor.is_floating_point()
            else tensor
            for tensor in flat
            if isinstance(tensor, Tensor)
        }
    # The zip has no name of its own, since a named zip would keep its last output alive.
    edges = [
        get_gradient_edge(inputs[id(tensor)]) for tensor, proxy in zip(flat, proxies, strict=True) if proxy is not None
    ]
    output = tree_map(lambda leaf: inputs.get(id(leaf), leaf), output)
    inputs.clear()
    flat.clear()  # training code holds only ``output``
    output = output if traces.restored is None else traces.restored(output)  # None for outputs that are inputs
    value = call_loss(loss, output)
    del output
    return torch.autograd.grad(value, edges, allow_unused=True)


@torch.enable_grad()
def call_loss(loss: Loss, output: Any) -> Tensor:
    """Return the loss of a model's result, one number with a gradient. Raise if the loss reads a tensor's value."""
    action = "give one that reads no value (.item(), if, a boolean mask), or none"
    try:
        with needs_no_values(lambda: "the loss: it", action):
            value = loss(output)
    except TypeError as error:
        raise TypeError(
            f"loss= was called with what forward returns and raised {error}; give a function of that alone, such as "
            f"lambda output: F.cross_entropy(output, targets)"
        ) from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        result = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"loss= returned {result}; return a tensor of one number that depends on what forward returns, and leave "
            f"backward() to the forecast"
        )
    return value

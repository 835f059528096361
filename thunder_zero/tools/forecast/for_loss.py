"""Removes the operations of backward for outputs that the loss does not use."""

from __future__ import annotations

import torch
from torch.autograd.graph import get_gradient_edge

from thunder_zero.tools.forecast.lines import empty_like, filled
from thunder_zero.tools.forecast.recorder import Loss, call_loss, loss_inputs, restore_output
from thunder_zero.tools.forecast.watch import WithoutValues
from thunder_zero.traces.compiled import Traces

from thunder.core.pytree import tree_map


def for_loss(traces: Traces, loss: Loss) -> Traces:
    """Return the traces for training with a loss, such as ``lambda output: output.loss``.

    A loss may ignore outputs of forward, such as logits. When a model runs, its backward skips operations that only
    ignored outputs need. Traces of a model that has not run still have these operations, and this function removes
    them.

    >>> traces = tz.tools.for_loss(tz.trace(model, tokens, labels=labels, policy=3), lambda output: output.loss)

    Raises:
        TypeError, NoForecast: :func:`thunder_zero.tools.memory` would raise this exception for the loss.
    """
    if traces.backward is None:
        return traces
    with WithoutValues():
        returned = traces.forward.bound_symbols[-1]
        outputs = {proxy.name: empty_like(proxy) for proxy in returned.flat_proxy_args}
        result = filled(returned.args[0], outputs)
        inputs = loss_inputs(result["flat_output"])
        pairs = zip(result["flat_output"], traces.backward.args[1], strict=True)
        trained = [(inputs[id(output)], tangent.name) for output, tangent in pairs if tangent is not None]
        edges = [get_gradient_edge(output) for output, _ in trained]
        output = tree_map(lambda leaf: inputs.get(id(leaf), leaf), result["output"])
        gradients = torch.autograd.grad(call_loss(loss, restore_output(traces, output)), edges, allow_unused=True)
    unused = [name for (_, name), gradient in zip(trained, gradients, strict=True) if gradient is None]
    return traces.without(unused) if unused else traces

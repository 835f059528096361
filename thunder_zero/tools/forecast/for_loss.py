"""Removes the operations of backward for outputs that the loss does not use."""

from __future__ import annotations

from thunder_zero.tools.forecast.lines import empty_like, filled
from thunder_zero.tools.forecast.recorder import Loss, gradients_of_loss
from thunder_zero.tools.forecast.watch import WithoutValues
from thunder_zero.traces.compiled import Traces


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
    returned = traces.forward.bound_symbols[-1]
    with WithoutValues():
        result = filled(returned.args[0], {proxy.name: empty_like(proxy) for proxy in returned.flat_proxy_args})
        gradients = gradients_of_loss(traces, [result["output"], list(result["flat_output"])], loss)
    tangents = (proxy.name for proxy in traces.backward.args[1] if proxy is not None)
    unused = [name for name, gradient in zip(tangents, gradients, strict=True) if gradient is None]
    return traces.without(unused) if unused else traces

"""``tz.tools.resized``: changes the input sizes of a traced program, without tracing or compiling.

If sizes are symbols, a program's lines are valid for any size. Its values still have the shapes of the traced call. A
forecast of memory with inputs of the new sizes has the new layout of every value::

    arange = aten.arange(s27)          s27 = 12, arange has (12,)      ->      s27 = 512, arange has (512,)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from thunder_zero.schedule.ops import Compute
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.watch import META, Layout, NoForecast
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.work import flops_of

from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.pytree import tree_map
from thunder.core.trace import TraceCtx, detached_trace, from_trace

Shapes = Mapping[str, Sequence[int]]


def resized(traces: Traces, shapes: Shapes) -> Traces:
    """Return the traces of a program with new shapes of inputs. Every tool accepts the result.

    >>> traces = tz.trace(model, tokens, policy=3, world_size=8, dynamic=True)
    >>> tz.tools.estimate(tz.tools.resized(traces, {"tokens": (16, 4096)}), "h100")

    Args:
        traces: traces with symbolic sizes, from ``dynamic=True`` or from a model called with several lengths.
        shapes: a mapping from names of inputs to new shapes. Other inputs with the same symbol or size also change.
    """
    numbers = _numbers(traces, shapes)
    try:
        values = _values(traces, numbers)
    except NoForecast as error:
        asked = ", ".join(f"{name} {_shown(shape)}" for name, shape in shapes.items())
        reason = str(error.__cause__).partition("\n")[0]
        raise ValueError(f"the program does not run for {asked}: {reason}; give shapes that fit together") from error
    forward = _with_values(traces.forward, values)
    backward = None if traces.backward is None else _with_values(traces.backward, values)
    timeline = _timeline(traces, forward, backward, values)
    return replace(
        traces,
        forward=forward,
        backward=backward,
        timeline=timeline,
        without_tangents=lambda _, missing: resized(traces.without(missing), shapes),
    )


def _numbers(traces: Traces, shapes: Shapes) -> dict[str, int]:
    hints = {proxy.name: proxy.value for proxy in traces.forward.args if isinstance(proxy, NumberProxy)}
    requested: dict[str, int] = {}
    for name, shape in shapes.items():
        sizes = traces.facts.input_shapes.get(name)
        if sizes is None or len(sizes) != len(shape):
            known = ((other, sizes) for other, sizes in traces.facts.input_shapes.items() if other not in traces.others)
            inputs = ", ".join(f"{other} {_shown(sizes)}" for other, sizes in known if sizes)
            raise ValueError(
                f"shapes has {name} {_shown(shape)}, and the program's inputs are {inputs}; give one of them"
            )
        for size, new_size in zip(sizes, shape, strict=True):
            if new_size != (size if size not in hints else requested.setdefault(str(size), new_size)):
                raise ValueError(
                    f"shapes has {name} {_shown(shape)}, and the program is for {_shown(sizes)}, whose numbers are "
                    f"constants and whose symbols have one size each; trace with dynamic=True, or call the model with "
                    f"two such sizes before"
                )
    return hints | _implied_numbers(traces, shapes, requested) | requested


def _implied_numbers(traces: Traces, shapes: Shapes, requested: Mapping[str, int]) -> dict[str, int]:
    """Return new values of further symbols: the new size of an input that had an equal size in that dimension."""
    old_shapes = {proxy.name: proxy.shape for proxy in traces.forward.args if isinstance(proxy, TensorProxy)}
    implied: dict[str, int] = {}
    for name, sizes in traces.facts.input_shapes.items():
        for reshaped, shape in shapes.items():
            for size, old_size, old_reshaped_size, new_size in zip(
                sizes, old_shapes[name], old_shapes[reshaped], shape, strict=False
            ):
                if size not in requested and old_size == old_reshaped_size:
                    implied.setdefault(str(size), new_size)
    return implied


def _shown(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))})"


def _values(traces: Traces, numbers: Mapping[str, int]) -> dict[str, Any]:
    inputs: dict[str, Any] = dict(numbers)
    for proxy in traces.forward.args:
        if isinstance(proxy, TensorProxy):
            sizes = [numbers.get(size, size) for size in traces.facts.input_shapes.get(proxy.name, proxy.shape)]
            inputs[proxy.name] = torch.empty(sizes, dtype=to_torch_dtype(proxy.dtype), device=META)
    traces = replace(traces, forward=_with_values(traces.forward, inputs))
    return Fold(Recorder(traces, "gloo"), traces.timeline).run().values


def _with_values(trace: TraceCtx, values: Mapping[str, Any]) -> TraceCtx:
    resized_proxies: dict[str, Proxy] = {}

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Proxy) or leaf.name not in values:
            return leaf
        if leaf.name not in resized_proxies:
            value = values[leaf.name]
            change = {"shape": tuple(value.shape)} if isinstance(value, Tensor | Layout) else {"value": value}
            resized_proxies[leaf.name] = leaf.replace(**change)
        return resized_proxies[leaf.name]

    resized_trace = from_trace(trace)
    with detached_trace():
        resized_trace.args = tree_map(resize, trace.args)
        for line in trace.bound_symbols:
            swaps = {variableify(proxy): resize(proxy) for proxy in (*line.flat_proxy_args, *line.flat_proxy_outs)}
            resized_trace.bound_symbols.append(line.from_bsym_swap_proxies(swaps))
    return resized_trace


def _timeline(traces: Traces, forward: TraceCtx, backward: TraceCtx | None, layouts: Mapping[str, Any]) -> Any:
    timeline = traces.timeline
    lines = (forward.bound_symbols, backward.bound_symbols if backward is not None else ())
    ops = [
        replace(op, flops=flops_of(lines[op.backward][positions[0]])) if isinstance(op, Compute) and op.flops else op
        for op, positions in zip(timeline.ops, traces.lines, strict=True)
    ]
    values = dict(timeline.values)
    for name in values:
        if isinstance(layout := layouts.get(name), Layout):
            values[name] = replace(values[name], nbytes=prod(layout.shape) * layout.dtype.itemsize)
    return replace(timeline, ops=tuple(ops), values=values)

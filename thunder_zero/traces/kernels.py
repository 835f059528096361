"""Compiles the fused regions of a phase with inductor, and equal regions once.

::

    (t, mm) = inductor_3(x, w)    ->    its lines as a graph, shapes and strides of x and w    ->    a function

Inductor needs the sizes (which may be symbols) and strides of a region's inputs. They come from fake values, computed
line by line from the inputs of the phase. Inductor chooses the layout of an output unless the phase returns it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_zero.compat.inductor import HoldsForSomeSizes, Kernel, faking, for_all_sizes, kernel, laid_out
from thunder_zero.compat.lines import with_functions
from thunder_zero.compat.private import (
    HigherOrderOperator,
    OpOverload,
    ShapeEnvGuardError,
    detect_fake_mode,
    run_and_save_rng_state,
    run_with_rng_state,
)
from thunder_zero.traces.fuse import graph_of
from thunder_zero.traces.lift import proxies_in
from thunder_zero.traces.operators import operator_of

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

DRAWS = (run_and_save_rng_state, run_with_rng_state)  # operators that run a random operator


@dataclass(frozen=True)
class Fakes:
    """The fake values of a program, keyed by name: AOTAutograd's values, and full parameters."""

    traced: Mapping[str, Any]
    full: Mapping[str, Any]


def with_kernels(
    trace: TraceCtx, fakes: Fakes, forward_values: Mapping[str, Any], module: str
) -> tuple[TraceCtx, Mapping[str, Any]]:
    """Return a phase whose regions call inductor's kernels, and a mapping from the phase's names to fake values.

    Args:
        trace: the phase.
        fakes: the fake values of the program.
        forward_values: the fakes of values that forward saves for this phase; empty if the phase is forward.
        module: the name of the model's class.

    Raises:
        RuntimeError: inductor cannot compile a region.
    """
    fake_values = _FakeValues(trace, fakes, forward_values)
    returned = _returned_names(trace)
    compiled: dict[tuple[str, ...], tuple[Kernel, Sequence[Any]]] = {}
    result = from_trace(trace)
    result.bound_symbols = []
    for line in trace.bound_symbols:
        if line.sym.is_fusion:
            inputs = [fake_values.values[proxy.name] for proxy in line.args]
            layouts = [fakes.traced.get(proxy.name) if proxy.name in returned else None for proxy in line.output]
            graph = graph_of(line)
            key = (str(graph.graph), *map(_layout_key, (*inputs, *layouts)))
            if key not in compiled:
                compiled[key] = _compile_region(graph, inputs, layouts, fake_values.mode, line, module)
            function, outputs = compiled[key]
            fake_values.values.update(zip((proxy.name for proxy in line.output), outputs, strict=True))
            line = with_functions(line, {line.sym.name: _taking_arguments(function)})
        else:
            fake_values.add(line)
        result.bound_symbols.append(line)
    return result, fake_values.values


def _returned_names(trace: TraceCtx) -> set[str]:
    """Return the names of a phase's results, except values saved for backward."""
    result = trace.bound_symbols[-1].args[0]
    return {proxy.name for proxy in proxies_in(result["output"] if isinstance(result, dict) else result)}


def _taking_arguments(run: Kernel) -> Callable[..., Sequence[Any]]:
    return lambda *args: run(list(args))


def _compile_region(
    graph: fx.GraphModule, inputs: Sequence[Any], layouts: Sequence[Any], mode: Any, region: BoundSymbol, module: str
) -> tuple[Kernel, Sequence[Any]]:
    """Return the kernel of a region, and its fake outputs.

    ``layouts`` has a fake value for each output whose layout must not change, and None for other outputs.
    """
    lines = region.subsymbols
    description = f"{lines[0].sym.name} ... {lines[-1].sym.name} ({len(lines)} operators)"
    try:
        return kernel(graph, inputs, layouts, mode)
    except HoldsForSomeSizes as error:
        warnings.warn(
            f"{module}: inductor's code of a region, {description}, would hold for some sizes only ({error}), so torch "
            f"computes its operators one by one; pass dynamic=False for a program for each shape",
            stacklevel=2,
        )
        with faking(mode):
            outputs = laid_out(graph(*inputs), layouts)
        return (lambda args: graph(*args)), outputs
    except RuntimeError as error:
        raise RuntimeError(
            f"{module}: inductor cannot compile a region, {description}: {error}; leave out fuse='inductor', by which "
            f"torch computes each operator"
        ) from error


def _layout_key(value: Any) -> str:
    """Return a string that is equal for values with equal sizes, strides, dtypes and devices."""
    if not isinstance(value, Tensor):
        return str(value)
    offset = torch.ops.aten.sym_storage_offset.default(value)  # the method takes no symbols
    return f"{tuple(value.shape)} {value.stride()} {offset} {value.dtype} {value.device}"


class _FakeValues:
    """The fake values of a phase, keyed by name. :meth:`add` takes the lines of the phase in order."""

    def __init__(self, trace: TraceCtx, fakes: Fakes, forward_values: Mapping[str, Any]) -> None:
        self.mode = detect_fake_mode(list(fakes.traced.values()))
        self.values: dict[str, Any] = {}
        self._fakes = fakes
        for proxy in proxies_in(trace.args):
            value = forward_values.get(proxy.name, fakes.traced.get(proxy.name))
            is_real = isinstance(value, Tensor) and detect_fake_mode([value]) is None
            self.values[proxy.name] = self.mode.from_tensor(value, static_shapes=True) if is_real else value

    def add(self, line: BoundSymbol) -> None:
        """Add the outputs of a line."""
        names, target = [proxy.name for proxy in line.flat_proxy_outs], operator_of(line)
        self.values.update((name, self._fakes.full[name]) for name in names if name in self._fakes.full)
        if target is not None and names:
            self._add_operator(line, target, {name: self._fakes.traced.get(name) for name in names})

    def _add_operator(self, line: BoundSymbol, target: Any, traced: Mapping[str, Any]) -> None:
        if isinstance(target, OpOverload) or target in DRAWS or None in traced.values():
            try:
                with for_all_sizes(self.mode):
                    self._run(line, target)
            except ShapeEnvGuardError:  # dynamo guards what torch's trace assumed
                self.values.update(traced)
        elif isinstance(target, HigherOrderOperator):
            self.values.update(traced)
        else:
            self.values.update({name: self._contiguous(value) for name, value in traced.items()})

    def _contiguous(self, value: Any) -> Any:
        """Return a contiguous fake for the zeros of a missing tangent, or the value itself if it is a number."""
        if not isinstance(value, Tensor):
            return value
        with self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def _run(self, line: BoundSymbol, target: Any) -> None:
        args, kwargs = tree_map(
            lambda leaf: self.values[leaf.name] if isinstance(leaf, Proxy) else leaf,
            (tuple(line.args), dict(line.kwargs)),
        )
        with faking(self.mode):
            result = target(*args, **kwargs)
        pairs = ((line.output, result),) if isinstance(line.output, Proxy) else zip(line.output, result, strict=True)
        self.values.update((proxy.name, value) for proxy, value in pairs if isinstance(proxy, Proxy))

"""Compiles the regions of a phase by inductor, those that are alike once.

::

    (t, mm) = inductor_3(x, w)    ->    its lines as a graph, and what x and w look like    ->    a function

What a value looks like (its sizes, which may be symbols, and its strides) follows from what the phase is given, line by
line: inductor lays out what a region makes as suits it, but for what the phase returns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_zero.compat.aot import RUN_AND_SAVE_STATE, RUN_WITH_STATE
from thunder_zero.compat.inductor import HoldsForSomeSizes, Kernel, faking, for_all_sizes, kernel, laid_out
from thunder_zero.compat.lines import with_functions
from thunder_zero.compat.private import HigherOrderOperator, OpOverload, ShapeEnvGuardError, detect_fake_mode
from thunder_zero.traces.coded import paths_of
from thunder_zero.traces.fuse import graph_of
from thunder_zero.traces.lift import proxies_in
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

DRAWS = (RUN_AND_SAVE_STATE, RUN_WITH_STATE)


@dataclass(frozen=True)
class Fakes:
    """What values of a program look like: as AOTAutograd traced it, by name, and parameters by path."""

    traced: Mapping[str, Any]
    parameters: Mapping[str, Any]
    executor: ZeroExecutor


def with_kernels(
    trace: TraceCtx, fakes: Fakes, before: Mapping[str, Any], module: str
) -> tuple[TraceCtx, Mapping[str, Any]]:
    """Return a phase whose regions call what inductor made of them, and what its values look like.

    Args:
        before: what values of forward look like, for backward.
        module: the name of the model's class.

    Raises:
        RuntimeError: inductor cannot compile a region.
    """
    known = _Known(trace, fakes, before)
    returned = _returned(trace)
    made: dict[tuple[str, ...], tuple[Kernel, Sequence[Any]]] = {}
    new = from_trace(trace)
    new.bound_symbols = []
    for line in trace.bound_symbols:
        if line.sym.is_fusion:
            inputs = [known.values[proxy.name] for proxy in line.args]
            wanted = [fakes.traced.get(proxy.name) if proxy.name in returned else None for proxy in line.output]
            graph = graph_of(line)
            alike = (str(graph.graph), *map(_look, (*inputs, *wanted)))
            if alike not in made:
                made[alike] = _compiled(graph, inputs, wanted, known.mode, line, module)
            run, outputs = made[alike]
            known.values.update(zip((proxy.name for proxy in line.output), outputs, strict=True))
            line = with_functions(line, {line.sym.name: _called(run)})
        else:
            known.see(line)
        new.bound_symbols.append(line)
    return new, known.values


def _returned(trace: TraceCtx) -> set[str]:
    """Return the names of what a phase returns, without what forward saves."""
    result = trace.bound_symbols[-1].args[0]
    return {proxy.name for proxy in proxies_in(result["output"] if isinstance(result, dict) else result)}


def _called(run: Kernel) -> Callable[..., Sequence[Any]]:
    return lambda *args: run(list(args))


def _compiled(
    graph: fx.GraphModule, inputs: Sequence[Any], wanted: Sequence[Any], mode: Any, region: BoundSymbol, module: str
) -> tuple[Kernel, Sequence[Any]]:
    """Return what computes a region, and what its outputs look like."""
    lines = region.subsymbols
    shown = f"{lines[0].sym.name} ... {lines[-1].sym.name} ({len(lines)} operators)"
    try:
        return kernel(graph, inputs, wanted, mode)
    except HoldsForSomeSizes as error:
        warnings.warn(
            f"{module}: inductor's code of a region, {shown}, would hold for some sizes only ({error}), so torch "
            f"computes its operators one by one; pass dynamic=False for a program for each shape",
            stacklevel=2,
        )
        with faking(mode):
            outputs = laid_out(graph(*inputs), wanted)
        return (lambda args: graph(*args)), outputs
    except RuntimeError as error:
        raise RuntimeError(
            f"{module}: inductor cannot compile a region, {shown}: {error}; leave out fuse='inductor', by which torch "
            f"computes each operator"
        ) from error


def _look(value: Any) -> str:
    """Return a text that is equal for values that look the same."""
    if not isinstance(value, Tensor):
        return str(value)
    offset = torch.ops.aten.sym_storage_offset.default(value)  # the method takes no symbols
    return f"{tuple(value.shape)} {value.stride()} {offset} {value.dtype} {value.device}"


class _Known:
    """What the values of a phase look like, as its lines are read in order."""

    def __init__(self, trace: TraceCtx, fakes: Fakes, before: Mapping[str, Any]) -> None:
        self.mode = detect_fake_mode(list(fakes.traced.values()))
        self.values: dict[str, Any] = {}
        self._fakes = fakes
        self._paths: dict[str, Sequence[str]] = {}  # of the parameters that are gathered, by handles
        for proxy in proxies_in(trace.args):
            value = before.get(proxy.name, fakes.traced.get(proxy.name))
            is_real = isinstance(value, Tensor) and detect_fake_mode([value]) is None
            self.values[proxy.name] = self.mode.from_tensor(value, static_shapes=True) if is_real else value

    def see(self, line: BoundSymbol) -> None:
        """Note what a line makes."""
        executor, outputs, target = self._fakes.executor, line.flat_proxy_outs, operator_of(line)
        if executor.launches.get(line.sym.name) is executor.all_gather:
            self._paths[line.output.name] = paths_of(line)
        elif line.sym.name in executor.waits and (paths := self._paths.get(line.args[0].name)):
            self._see_parameters(outputs, paths)  # or bytes, which no operator reads
        elif executor.codes.get(line.sym.name) is executor.decode:
            self._see_parameters(outputs, paths_of(line))
        elif line.sym == executor.cast:
            self.values[line.output.name] = self._fakes.parameters[line.args[1]]
        elif target is not None and outputs:
            self._see_operator(line, target, {proxy.name: self._fakes.traced.get(proxy.name) for proxy in outputs})

    def _see_parameters(self, outputs: Sequence[Proxy], paths: Sequence[str]) -> None:
        parameters = self._fakes.parameters
        self.values.update((proxy.name, parameters[path]) for proxy, path in zip(outputs, paths, strict=True))

    def _see_operator(self, line: BoundSymbol, target: Any, traced: Mapping[str, Any]) -> None:
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
        """Return what zeros look like in the place of a value that nobody made; a number stays."""
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
            made = target(*args, **kwargs)
        pairs = ((line.output, made),) if isinstance(line.output, Proxy) else zip(line.output, made, strict=True)
        self.values.update((proxy.name, value) for proxy, value in pairs if isinstance(proxy, Proxy))

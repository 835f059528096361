"""Compiles the regions of a phase by inductor, those that are alike once.

::

    (t, mm) = inductor_3(x, w)    ->    its lines as a graph, and what x and w look like    ->    a function

What a value looks like (its sizes, which may be symbols, and its strides) is what AOTAutograd's trace says of it; what
the schedule gathers or computes again looks like its original.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from thunder_zero.compat.inductor import HoldsForSomeSizes, Kernel, kernel
from thunder_zero.compat.private import OpOverload, detect_fake_mode
from thunder_zero.traces.fuse import graph_of
from thunder_zero.traces.operators import operator_of
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace

ZEROS = torch.ops.aten.zeros.default


@dataclass(frozen=True)
class Fakes:
    """What values look like: of a program as AOTAutograd traced it, by name, and of parameters, by path."""

    values: Mapping[str, Any]
    parameters: Mapping[str, Any]
    executor: ZeroExecutor


def with_kernels(trace: TraceCtx, fakes: Fakes, module: str) -> TraceCtx:
    """Return a phase whose regions call what inductor made of them; ``module`` is the name of the model's class.

    Raises:
        RuntimeError: inductor cannot compile a region.
    """
    known = _Known(fakes)
    made: dict[tuple[str, ...], Kernel] = {}
    new = from_trace(trace)
    new.bound_symbols = []
    for line in trace.bound_symbols:
        if line.sym.is_fusion:
            for inner in line.subsymbols:
                known.see(inner)
            inputs = [known.values[proxy.name] for proxy in line.args]
            graph = graph_of(line)
            alike = (str(graph.graph), *map(_look, inputs))
            if alike not in made:
                made[alike] = _compiled(graph, inputs, known.mode, line, module)
            line = line.from_bsym(_call_ctx={line.sym.name: _called(made[alike])})
        else:
            known.see(line)
        new.bound_symbols.append(line)
    return new


def _called(run: Kernel) -> Callable[..., Sequence[Any]]:
    return lambda *args: run(list(args))


def _compiled(graph: fx.GraphModule, inputs: Sequence[Any], mode: Any, region: BoundSymbol, module: str) -> Kernel:
    lines = region.subsymbols
    shown = f"{lines[0].sym.name} ... {lines[-1].sym.name} ({len(lines)} operators)"
    try:
        return kernel(graph, inputs, mode)
    except HoldsForSomeSizes as error:
        warnings.warn(
            f"{module}: inductor's code of a region, {shown}, would hold for some sizes only ({error}), so torch "
            f"computes its operators one by one; pass dynamic=False for a program for each shape",
            stacklevel=2,
        )
        return lambda args: graph(*args)
    except RuntimeError as error:
        raise RuntimeError(
            f"{module}: inductor cannot compile a region, {shown}: {error}; leave out fuse='inductor', by which torch "
            f"computes each operator"
        ) from error


def _look(value: Any) -> str:
    """Return a text that is equal for values that look the same."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.dtype} {value.device}"


class _Known:
    """What the values of a phase look like, as its lines are read in order."""

    def __init__(self, fakes: Fakes) -> None:
        self.mode = detect_fake_mode(list(fakes.values.values()))
        self.values = {name: self._fake(value) for name, value in fakes.values.items()}
        self._fakes = fakes
        self._paths: dict[str, Sequence[str]] = {}  # of the parameters that are gathered, by handles

    def _fake(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and detect_fake_mode([value]) is None
        return self.mode.from_tensor(value) if is_real else value

    def see(self, line: BoundSymbol) -> None:
        """Note what a line makes, where that is not known."""
        executor, outputs = self._fakes.executor, line.flat_proxy_outs
        if executor.launches.get(line.sym.name) is executor.all_gather:
            self._paths[line.output.name] = (line.args[1],) if isinstance(line.args[1], str) else line.args[1]
        elif line.sym.name in executor.waits and (paths := self._paths.get(line.args[0].name)):
            parameters = self._fakes.parameters
            self.values.update((proxy.name, parameters[path]) for proxy, path in zip(outputs, paths, strict=True))
        elif (target := operator_of(line)) is None or not outputs:
            return
        elif all(proxy.name in self.values for proxy in outputs):
            if target is ZEROS or not isinstance(target, OpOverload):  # zeros in the place of what nobody made
                made = [proxy.name for proxy in outputs if isinstance(proxy, TensorProxy)]
                self.values.update((name, self._contiguous(self.values[name])) for name in made)
        else:
            self._run(line, target)

    def _contiguous(self, value: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)

    def _run(self, line: BoundSymbol, target: Any) -> None:
        args, kwargs = tree_map(
            lambda leaf: self.values[leaf.name] if isinstance(leaf, Proxy) else leaf,
            (tuple(line.args), dict(line.kwargs)),
        )
        with self.mode, torch.no_grad():
            made = target(*args, **kwargs)
        pairs = ((line.output, made),) if isinstance(line.output, Proxy) else zip(line.output, made, strict=True)
        self.values.update((proxy.name, value) for proxy, value in pairs if isinstance(proxy, Proxy))

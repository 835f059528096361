"""Fuses the torch operators between two of our lines into one region, which inductor compiles.

::

    mm = torch.ops.aten.mm.default(x, w)
    t = torch.ops.aten.silu.default(mm)       ->      (t, mm) = inductor_3(x, w)
    p4 = zero_all_gather(...)                         p4 = zero_all_gather(...)

Fusion comes after scheduling, so regions end at scheduled collectives. Lines that draw random numbers, communicate, or
call Python are not fused: inductor would draw other numbers than torch, and may move collectives.
``traces/kernels.py`` compiles the regions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from thunder_zero.compat.lines import bind
from thunder_zero.compat.private import OpOverload
from thunder_zero.schedule.timeline import Work
from thunder_zero.traces.lift import forward_lines
from thunder_zero.traces.operators import EXECUTOR, operator_of, work_of_operator

from thunder.core import prims
from thunder.core.proxies import IntegerProxy, Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, from_trace

SMALLEST = 2  # a region has at least this many lines that compute something
COMMUNICATES = ("_c10d_functional", "_dtensor", "c10d", "symm_mem")


def fuse_regions(trace: TraceCtx) -> TraceCtx:
    """Return a scheduled trace in which one line replaces each run of fusible operators of one phase."""
    new = from_trace(trace)
    new.bound_symbols = []
    lines = trace.bound_symbols
    is_backward = [not needed for needed in forward_lines(lines)]
    readers = _last_readers(trace)
    numbers = [arg for arg in trace.args if isinstance(arg, IntegerProxy)]  # symbolic sizes
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and _is_fusible(lines[end]) and is_backward[end] == is_backward[start]:
            end += 1
        if sum(map(_computes, lines[start:end])) < SMALLEST:
            end = max(end, start + 1)
            new.bound_symbols += lines[start:end]
        else:
            name = f"inductor_{sum(line.sym.is_fusion for line in new.bound_symbols)}"
            returned = {value for value, reader in readers.items() if reader >= end}
            new.bound_symbols.append(_region(name, lines[start:end], numbers, returned, backward=is_backward[start]))
        start = end
    return new


def _is_fusible(line: BoundSymbol) -> bool:
    target, tags = operator_of(line), line.sym.tags or ()
    if not isinstance(target, OpOverload) or target.namespace in COMMUNICATES:
        return False
    return not {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE} & set(tags)


def _computes(line: BoundSymbol) -> bool:
    return work_of_operator(operator_of(line)) not in (Work.VIEW, Work.NONE)


def _last_readers(trace: TraceCtx) -> dict[str, int]:
    """Return a mapping from values to the index of the last line that reads them."""
    return {proxy.name: index for index, line in enumerate(trace.bound_symbols) for proxy in line.flat_proxy_args}


def _region(
    name: str, lines: Sequence[BoundSymbol], numbers: Sequence[Proxy], returned: set[str], *, backward: bool
) -> BoundSymbol:
    """Return one line for the given lines. It reads all symbolic sizes, since no line lists the sizes that it uses."""
    written = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_outs}
    read = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_args if proxy.name not in written}
    read |= {number.name: number for number in numbers}
    outputs = tuple(proxy for value, proxy in written.items() if value in returned)
    symbol = Symbol(name, id=name, is_fusion=True, executor=EXECUTOR)
    functions = {name: _not_compiled}  # a placeholder, which printing a line needs
    region = bind(symbol, read.values(), {}, outputs, functions, lines)
    if backward:
        region.tags.add(BoundSymbolTag.BACKWARD)
    return region


def _not_compiled(*args: Any) -> Any:
    raise AssertionError("a region runs once it is compiled")


def graph_of(region: BoundSymbol) -> fx.GraphModule:
    """Return the lines of a region as a graph. Names in the graph do not depend on names in the trace, so equal regions
    have equal text."""
    graph = fx.Graph()
    nodes: dict[str, Any] = {proxy.name: graph.placeholder(f"arg{index}") for index, proxy in enumerate(region.args)}

    def filled(tree: Any) -> Any:
        return tree_map(lambda leaf: nodes[leaf.name] if isinstance(leaf, Proxy) else leaf, tree)

    for line in region.subsymbols:
        node = graph.call_function(operator_of(line), filled(tuple(line.args)), filled(dict(line.kwargs)))
        if isinstance(line.output, Proxy):
            nodes[line.output.name] = node
        else:
            items = enumerate(line.output)
            proxies = ((index, item) for index, item in items if isinstance(item, Proxy))
            nodes |= {item.name: graph.call_function(operator.getitem, (node, index)) for index, item in proxies}
    graph.output([nodes[proxy.name] for proxy in region.output])
    return fx.GraphModule(nn.Module(), graph)

"""Fuses torch's operators between two lines of ours into one, which inductor compiles.

::

    mm = torch.ops.aten.mm.default(x, w)
    t = torch.ops.aten.silu.default(mm)       ->      (t, mm) = TorchCompile3(x, w)
    p4 = zero_all_gather(...)                         p4 = zero_all_gather(...)

The scheduled joint trace is fused, so regions end where the schedule has a line of its own. Lines that draw random
numbers, or call Python, stay as they are: inductor would draw other numbers than torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from thunder_zero.compat.private import OpOverload
from thunder_zero.traces.lift import forward_lines
from thunder_zero.traces.operators import EXECUTOR, operator_of

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, from_trace

SMALLEST = 2  # lines of a region


def fused(trace: TraceCtx) -> TraceCtx:
    """Return a scheduled trace with each run of operators of one phase as one line."""
    new = from_trace(trace)
    new.bound_symbols = []
    lines = trace.bound_symbols
    is_backward = [not needed for needed in forward_lines(lines)]
    readers = _last_readers(trace)
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and _is_fusible(lines[end]) and is_backward[end] == is_backward[start]:
            end += 1
        if end - start < SMALLEST:
            end = max(end, start + 1)
            new.bound_symbols += lines[start:end]
        else:
            name = f"TorchCompile{sum(line.sym.is_fusion for line in new.bound_symbols)}"
            new.bound_symbols.append(_region(name, lines[start:end], end, readers, backward=is_backward[start]))
        start = end
    return new


def _is_fusible(line: BoundSymbol) -> bool:
    target, tags = operator_of(line), line.sym.tags or ()
    return isinstance(target, OpOverload) and not {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE} & set(tags)


def _last_readers(trace: TraceCtx) -> dict[str, int]:
    """Return the position of the last line that reads each value."""
    return {proxy.name: at for at, line in enumerate(trace.bound_symbols) for proxy in line.flat_proxy_args}


def _region(
    name: str, lines: Sequence[BoundSymbol], end: int, readers: dict[str, int], *, backward: bool
) -> BoundSymbol:
    """Return one line for these; ``end`` is the position behind them."""
    made = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_outs}
    read = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_args if proxy.name not in made}
    outputs = tuple(proxy for value, proxy in made.items() if readers.get(value, -1) >= end)
    function = _compiled(lines, list(read.values()), outputs)
    symbol = Symbol(name, id=name, is_fusion=True, executor=EXECUTOR)
    region = symbol.bind(*read.values(), output=outputs, subsymbols=tuple(lines), _call_ctx={name: function})
    if backward:
        region.tags.add(BoundSymbolTag.BACKWARD)
    return region


def _compiled(lines: Sequence[BoundSymbol], read: Sequence[Proxy], outputs: Sequence[Proxy]) -> Callable[..., Any]:
    """Return what computes a region."""
    graph = fx.Graph()
    nodes: dict[str, Any] = {proxy.name: graph.placeholder(proxy.name) for proxy in read}

    def filled(tree: Any) -> Any:
        return tree_map(lambda leaf: nodes[leaf.name] if isinstance(leaf, Proxy) else leaf, tree)

    for line in lines:
        node = graph.call_function(operator_of(line), filled(tuple(line.args)), filled(dict(line.kwargs)))
        if isinstance(line.output, Proxy):
            nodes[line.output.name] = node
        else:
            items = enumerate(line.output)
            proxies = ((at, item) for at, item in items if isinstance(item, Proxy))
            nodes |= {item.name: graph.call_function(operator.getitem, (node, at)) for at, item in proxies}
    graph.output(tuple(nodes[proxy.name] for proxy in outputs))
    compiled: Callable[..., Any] = torch.compile(fx.GraphModule(nn.Module(), graph), fullgraph=True, dynamic=False)
    return compiled

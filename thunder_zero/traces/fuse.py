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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from thunder_zero.compat.lines import bind
from thunder_zero.compat.private import OpOverload
from thunder_zero.schedule.ops import Compute, Op, Work
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import computation
from thunder_zero.traces.operators import EXECUTOR, operator_of
from thunder_zero.traces.write import Writer

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, Symbol

SMALLEST = 2  # a region has at least this many lines that compute something
COMMUNICATES = ("_c10d_functional", "_dtensor", "c10d", "symm_mem")


def fuse(timeline: Timeline, writer: Writer) -> Timeline:
    """Return the timeline with one computation in place of each run of fusible operators of a phase."""
    ops = timeline.ops
    readers = {name: index for index, op in enumerate(ops) for name in op.reads}
    numbers = {name: writer.proxies[name] for name in timeline.inputs if name in timeline.numbers}  # symbolic sizes
    values = dict(timeline.values)
    result: list[Op] = []
    regions, start = sum(map(_is_region, ops)), 0  # forward of a program without some tangents is fused already
    while start < len(ops):
        end = start
        while end < len(ops) and _is_fusible(ops[end]) and ops[end].backward == ops[start].backward:
            end += 1
        if sum(map(_computes, ops[start:end])) < SMALLEST:
            end = max(end, start + 1)
            result += ops[start:end]
        else:
            lines = [writer.computation(op) for op in ops[start:end] if isinstance(op, Compute)]
            returned = {name for op in ops[start:end] for name in op.writes if readers.get(name, -1) >= end}
            region = _region(f"inductor_{regions}", lines, numbers, returned)
            repeats = tuple(flops for op in ops[start:end] for flops in timeline.repeats(op))
            result.append(replace(computation(region, backward=ops[start].backward), repeats=repeats))
            values.update((name, replace(values[name], base="")) for name in returned)
            regions += 1
        start = end
    return timeline.with_ops(result, values)


def _is_region(op: Op) -> bool:
    line: Any = op.line if isinstance(op, Compute) else None
    return line is not None and line.sym.is_fusion


def _is_fusible(op: Op) -> bool:
    if not isinstance(op, Compute):
        return False
    line: Any = op.line
    target, tags = operator_of(line), line.sym.tags or ()
    if not isinstance(target, OpOverload) or target.namespace in COMMUNICATES:
        return False
    return not {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE} & set(tags)


def _computes(op: Op) -> bool:
    return isinstance(op, Compute) and op.work not in (Work.VIEW, Work.AWAIT, Work.NONE)


def _region(name: str, lines: Sequence[BoundSymbol], numbers: Mapping[str, Proxy], returned: set[str]) -> BoundSymbol:
    """Return one line for the given lines. It reads all symbolic sizes, since no line lists the sizes that it uses."""
    written = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_outs}
    read = {proxy.name: proxy for line in lines for proxy in line.flat_proxy_args if proxy.name not in written}
    outputs = tuple(proxy for value, proxy in written.items() if value in returned)
    symbol = Symbol(name, id=name, is_fusion=True, executor=EXECUTOR)
    functions = {name: _not_compiled}  # a placeholder, which printing a line needs
    return bind(symbol, (read | dict(numbers)).values(), {}, outputs, functions, lines)


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

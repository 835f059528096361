"""Writes a timeline as a joint trace.

Emitting mostly reorders lines: a compute line is the lifted line, with other names where the timeline reads (or, in a
copy, writes) other values. Collectives are new lines, since they may have been merged into buckets::

    gather fut <- t_w, t_b   w b        t5 = zero_all_gather_coalesced((t_w, t_b), ('w', 'b'))
    wait   w, b <- fut       w b   ->   (t6, t7) = zero_wait_coalesced(t5)
"""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.schedule.timeline import Kind, Op, Timeline
from thunder_zero.traces.lift import PREAMBLE, TraceLine, lines_of, read_by, written_by
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx


def emit(trace: TraceCtx, timeline: Timeline, executor: ZeroExecutor) -> TraceCtx:
    """The joint trace that runs ``timeline``, which was lifted from ``trace``."""
    lines = lines_of(trace)
    proxies = {proxy.name: proxy for line in lines for proxy in (*line.given, *line.gives)}
    new = from_trace(trace)
    new.bound_symbols = [line.bsym for line in lines if line.bsym.sym.id in PREAMBLE]
    with tracectx(new):
        for op in timeline.ops:
            if op.kind is not Kind.FREE:
                new.bound_symbols.append(_line(op, lines, proxies, executor))
    new.set_provenance(TraceProvenance("Schedule collectives (thunder_zero)"))
    return new


def _line(op: Op, lines: Sequence[TraceLine], proxies: dict[str, Proxy], executor: ZeroExecutor) -> BoundSymbol:
    if op.kind in (Kind.COMPUTE, Kind.DEFER):
        bsym = _compute(op, lines[op.source[0]], proxies)
    elif op.kind is Kind.WAIT:
        bsym = _wait(op, proxies, executor)
    else:
        bsym = _launch(op, executor.launches[lines[op.source[0]].bsym.sym.name], proxies, executor)
    if op.backward and (op.repeated or op.kind is not Kind.COMPUTE):
        bsym.tags.add(BoundSymbolTag.BACKWARD)
    return bsym


def _compute(op: Op, line: TraceLine, proxies: dict[str, Proxy]) -> BoundSymbol:
    """The lifted line, with the names of the values that the operation reads and writes."""
    written = written_by(line)
    for name, original in zip(op.writes, written.values(), strict=True):
        if name not in proxies:
            proxies[name] = original.replace_name(name)
    before, after = [*read_by(line), *written], [*op.reads, *op.writes]
    swap = {variableify(proxies[b]): proxies[a] for b, a in zip(before, after, strict=True) if a != b}
    return line.bsym.from_bsym_swap_proxies(swap) if swap else line.bsym


def _launch(op: Op, single: Symbol, proxies: dict[str, Proxy], executor: ZeroExecutor) -> BoundSymbol:
    tensors = tuple(proxies[name] for name in op.reads)
    handle = executor.handle_of(single, tensors, op.params)
    proxies[op.writes[0]] = handle
    if len(tensors) == 1:
        return single.bind(tensors[0], op.params[0], output=handle)
    return executor.coalesced[single].bind(tensors, op.params, output=handle)


def _wait(op: Op, proxies: dict[str, Proxy], executor: ZeroExecutor) -> BoundSymbol:
    handle = proxies[op.reads[0]]
    for name, path in zip(op.writes, op.params, strict=True):
        if name not in proxies:  # a copy, so the wait of a gather
            shape = executor.plan.by_name[path].shape
            proxies[name] = TensorProxy(name, shape=shape, device=handle.device, dtype=handle.dtype)
    outputs = tuple(proxies[name] for name in op.writes)
    if len(outputs) == 1:
        return executor.wait.bind(handle, output=outputs[0])
    return executor.coalesced[executor.wait].bind(handle, output=outputs)

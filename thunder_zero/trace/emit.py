"""Timeline -> joint trace.

Emitting is reordering: a compute line is the line that was lifted, reading (and, computed again,
writing) other names where the timeline says so. Only the collectives are built anew, since they
may have been grouped::

    gather fut <- t_w, t_b   w b        t5 = zero_all_gather_coalesced((t_w, t_b), ('w', 'b'))
    wait   w, b <- fut       w b   ->   (t6, t7) = zero_wait_coalesced(t5)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from thunder.core.proxies import FutureTensorProxy, Proxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

from thunder_zero.runtime.executor import ZeroExecutor
from thunder_zero.timeline import Kind, Op, Timeline
from thunder_zero.trace.lift import PREAMBLE, read_by, written_by


def emit(trace: TraceCtx, timeline: Timeline, executor: ZeroExecutor) -> TraceCtx:
    """The joint trace that runs ``timeline``, whose operations were lifted from ``trace``."""
    new = from_trace(trace)
    proxies = {proxy.name: proxy for bsym in trace.bound_symbols for proxy in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
    new.bound_symbols = [bsym for bsym in trace.bound_symbols if bsym.sym.id in PREAMBLE]
    with tracectx(new):
        for op in timeline.ops:
            if op.kind is not Kind.FREE:
                new.bound_symbols.append(_emit_op(op, trace.bound_symbols, proxies, executor))
    new.set_provenance(TraceProvenance("Schedule collectives (thunder_zero)"))
    return new


def _emit_op(
    op: Op, bsyms: Sequence[BoundSymbol], proxies: dict[str, Proxy], executor: ZeroExecutor
) -> BoundSymbol:
    sources = [bsyms[position] for position in op.source]
    if op.again:
        _name_copies(op, sources, proxies)
    if op.kind is Kind.COMPUTE:
        bsym = _swapped(op, sources[0], proxies)
    else:
        bsym = _collective(op, sources[0], proxies, executor)
    if op.backward and op.kind is not Kind.COMPUTE or op.again and op.backward:
        bsym.tags.add(BoundSymbolTag.BACKWARD)
    return bsym


def _name_copies(op: Op, sources: Sequence[BoundSymbol], proxies: dict[str, Proxy]) -> None:
    """Make the proxies that a copy writes, under the names that the timeline gives them."""
    originals = [proxy for bsym in sources for proxy in written_by(bsym).values()]
    for name, original in zip(op.writes, originals if op.kind is not Kind.GATHER else originals[:1], strict=True):
        if name not in proxies:
            proxies[name] = original.replace_name(name)


def _swapped(op: Op, bsym: BoundSymbol, proxies: dict[str, Proxy]) -> BoundSymbol:
    before, after = [*read_by(bsym), *written_by(bsym)], [*op.reads, *op.writes]
    swap = {variableify(proxies[b]): proxies[a] for b, a in zip(before, after, strict=True) if a != b}
    return bsym.from_bsym_swap_proxies(swap) if swap else bsym


def _collective(op: Op, first: BoundSymbol, proxies: dict[str, Proxy], executor: ZeroExecutor) -> BoundSymbol:
    if op.kind is Kind.WAIT:
        outputs = tuple(proxies[name] for name in op.writes)
        handle = proxies[op.reads[0]]
        if len(outputs) == 1:
            return executor.wait.bind(handle, output=outputs[0])
        return executor.coalesced[executor.wait].bind(handle, output=outputs)
    single = executor.launches()[first.sym.name]
    tensors = tuple(proxies[name] for name in op.reads)
    if len(tensors) == 1:
        return single.bind(tensors[0], op.params[0], output=proxies[op.writes[0]])
    handle = FutureTensorProxy(
        shape=(sum(prod(tensor.shape) for tensor in tensors),), device=tensors[0].device, dtype=tensors[0].dtype
    )
    proxies[op.writes[0]] = handle  # the bucket's handle takes the place of its first member's
    return executor.coalesced[single].bind(tensors, op.params, output=handle)

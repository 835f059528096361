"""Traces -> timeline.

``lift`` reads the joint trace, lowered and not yet fused or split, for the passes to decide on.
``lift_halves`` reads the forward and the backward trace that run, for checks and reports: there the
``del`` lines are the frees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from thunder_zero.cone import frees_of_gathered
from thunder_zero.runtime.executor import ZeroExecutor, dtype_name
from thunder_zero.timeline import Kind, Op, Timeline, Value

from thunder.core import prims
from thunder.core.proxies import FutureTensorProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_iter
from thunder.core.symbol import BoundSymbol, gather_tags
from thunder.core.trace import TraceCtx
from thunder.executors.pythonex import clear_mutable_collection

PREAMBLE = {prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.UNPACK_SEQUENCE, prims.PrimIDs.COMMENT}
NOT_REPEATABLE = {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE, prims.OpTags.DONT_DCE}


def lift(trace: TraceCtx, executor: ZeroExecutor) -> Timeline:
    """The timeline of a joint trace: one operation a line, forward half first.

    A line belongs to forward if forward's outputs need it, which is how Thunder will split.
    """
    needed = _forward_lines(trace.bound_symbols)
    ops = [
        replace(op, backward=not needed[position])
        for position, bsym in enumerate(trace.bound_symbols)
        for op in _ops(bsym, position, executor)
    ]
    ops.sort(key=lambda op: op.backward)
    return Timeline(tuple(_with_params(ops)), _values(trace.bound_symbols), executor.plan, executor.replicated)


def lift_halves(forward: TraceCtx, backward: TraceCtx | None, executor: ZeroExecutor) -> Timeline:
    """The timeline of the two traces that run; ``source`` counts within each half."""
    halves = [(forward, False)] + ([(backward, True)] if backward is not None else [])
    ops = [
        replace(op, backward=is_backward)
        for trace, is_backward in halves
        for position, bsym in enumerate(trace.bound_symbols)
        for op in _ops(bsym, position, executor)
    ]
    values = {name: value for trace, _ in halves for name, value in _values(trace.bound_symbols).items()}
    return frees_of_gathered(Timeline(tuple(_with_params(ops)), values, executor.scheduled, executor.replicated))


def _ops(bsym: BoundSymbol, position: int, executor: ZeroExecutor) -> Iterator[Op]:
    if bsym.sym.id in PREAMBLE or bsym.sym is clear_mutable_collection:
        return
    reads, writes = tuple(read_by(bsym)), tuple(written_by(bsym))
    source = (position,)
    if bsym.sym.id is prims.PrimIDs.DEL:
        yield Op(Kind.FREE, reads, source=source)
    elif single := executor.launches.get(bsym.sym.name):
        kind = Kind.GATHER if single is executor.all_gather else Kind.REDUCE
        paths = (
            bsym.args[1]
            if isinstance(bsym.args[1], Sequence) and not isinstance(bsym.args[1], str)
            else (bsym.args[1],)
        )
        yield Op(kind, reads, writes, params=tuple(paths), source=source)
    elif bsym.sym in (executor.wait, executor.coalesced[executor.wait]):
        yield Op(Kind.WAIT, reads, writes, source=source)
    else:
        yield Op(Kind.COMPUTE, reads, writes, repeatable=_is_repeatable(bsym), source=source)


def read_by(bsym: BoundSymbol) -> dict[str, Proxy]:
    """What a line reads, by name. A ``get_grad`` names an output of forward and reads its gradient; forward's
    return hands out outputs, and saves the rest for backward, where it is read."""
    if bsym.sym is prims.get_grad:
        return {}
    is_forward_return = bsym.sym is prims.python_return and len(bsym.args) == 2 and isinstance(bsym.args[0], dict)
    read = tree_iter(bsym.args[0]["flat_output"]) if is_forward_return else bsym.flat_proxy_args
    return {proxy.name: proxy for proxy in read if isinstance(proxy, Proxy)}


def written_by(bsym: BoundSymbol) -> dict[str, Proxy]:
    """What a line writes, by name; an input that it hands through is not written."""
    inputs = {proxy.name for proxy in bsym.flat_proxy_args}
    return {proxy.name: proxy for proxy in bsym.flat_proxy_outs if proxy.name not in inputs}


def _with_params(ops: Sequence[Op]) -> Iterator[Op]:
    """Waits carry the parameters of their launches."""
    params: dict[str, tuple[str, ...]] = {}
    for op in ops:
        if op.kind in (Kind.GATHER, Kind.REDUCE):
            params[op.writes[0]] = op.params
        yield replace(op, params=params[op.reads[0]]) if op.kind is Kind.WAIT else op


def _values(bsyms: Sequence[BoundSymbol]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for bsym in bsyms:
        for proxy in (*bsym.flat_proxy_outs, *bsym.flat_proxy_args):
            if proxy.name not in values and isinstance(proxy, TensorProxy | FutureTensorProxy):
                values[proxy.name] = Value(proxy.numel * dtype_bytes(proxy), dtype_name(proxy.dtype))
    return values


def dtype_bytes(proxy: TensorProxy | FutureTensorProxy) -> int:
    """Bytes of one element."""
    return int(proxy.dtype.bytes)


def _forward_lines(bsyms: Sequence[BoundSymbol]) -> list[bool]:
    """Which lines forward's outputs need: Thunder's rule for the split, on positions."""
    result = bsyms[-1].args[0]
    if not (isinstance(result, dict) and "fw_flat_out" in result):
        return [True] * len(bsyms)
    needed = {proxy.name for proxy in tree_iter(result["fw_flat_out"]) if isinstance(proxy, Proxy)}
    needed |= {proxy.name for proxy in result["flat_args"] if isinstance(proxy, Proxy)}
    lines = [False] * len(bsyms)
    for position in reversed(range(len(bsyms) - 1)):
        bsym = bsyms[position]
        if bsym.sym is prims.get_grad:
            continue
        updates = bsym.sym.name == "copy_" and bsym.args[1].name in needed
        if updates or bsym.sym.id in PREAMBLE or any(proxy.name in needed for proxy in bsym.flat_proxy_outs):
            lines[position] = True
            needed.update(proxy.name for proxy in bsym.flat_proxy_args)
    return lines


def _is_repeatable(bsym: BoundSymbol) -> bool:
    """Whether running a line twice gives the same values and does no harm."""
    if bsym.sym in (prims.python_return, prims.get_grad) or gather_tags(bsym) & NOT_REPEATABLE:
        return False
    return not any(name == "copy_" or _draws_random_numbers(name) for name in _symbol_names(bsym))


def _symbol_names(bsym: BoundSymbol) -> Iterator[str]:
    yield bsym.sym.name
    for inner in bsym.subsymbols:
        yield from _symbol_names(inner)


@cache
def _draws_random_numbers(name: str) -> bool:
    """Whether torch tags the operator as seeded; Thunder does not tag all that it lowers or registers by itself."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)

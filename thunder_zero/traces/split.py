"""Splits a joint trace into the traces that run, forward and backward, each with ``del`` lines.

Lines are shared with the joint trace, since a copy would lose its cached reads and writes. Lines of backward that
nothing needs are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from thunder_zero.traces.lift import forward_lines, proxies_in

from thunder.core import prims
from thunder.core.proxies import CollectionProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, gather_tags
from thunder.core.trace import TraceCtx, TraceProvenance, TraceTag, from_trace, tracectx
from thunder.executors.pythonex import clear_mutable_collection

NO_USES = (prims.PrimIDs.COMMENT, prims.PrimIDs.UNPACK_TRIVIAL)


def split(trace: TraceCtx) -> tuple[TraceCtx, TraceCtx]:
    """Return the forward and the backward of a joint trace, which free each value after its last use."""
    *lines, end = trace.bound_symbols
    result, needed = end.args[0], forward_lines(trace.bound_symbols)
    forward_part = [line for line, is_forward in zip(lines, needed[:-1], strict=True) if is_forward]
    backward_lines = [line for line, is_forward in zip(lines, needed[:-1], strict=True) if not is_forward]
    tangents = [line for line in backward_lines if line.sym is prims.get_grad]
    backward_part = [line for line in backward_lines if line.sym is not prims.get_grad]
    known = {proxy.name for proxy in proxies_in((result["fw_flat_out"], result["flat_args"]))}
    known.update(proxy.name for line in forward_part for proxy in (*line.flat_proxy_args, *line.flat_proxy_outs))
    used = [proxy for line in backward_part for proxy in line.flat_proxy_args] + proxies_in(result["output"])
    read = {proxy.name: proxy for proxy in used if proxy.name in known}
    tensors = tuple(proxy for proxy in read.values() if isinstance(proxy, TensorProxy))
    numbers = tuple(proxy for proxy in read.values() if not isinstance(proxy, TensorProxy))
    forward = _make_forward(trace, forward_part, result, (tensors, numbers))
    backward = _make_backward(
        forward, backward_part, result["output"], (tensors, numbers), _cotangents(result, tangents)
    )
    return add_frees(forward), add_frees(backward)


def _make_forward(trace: TraceCtx, lines: Sequence[BoundSymbol], result: dict[str, Any], saved: Any) -> TraceCtx:
    """Return the forward trace, which also returns the values that it saves for backward."""
    forward = from_trace(trace)
    forward.tags.add(TraceTag.AUGMENTED_FORWARD)
    forward.names = forward.names.copy()
    forward.bound_symbols += lines
    outputs = result["fw_flat_out"]
    entries = {name: part for name, part in result.items() if name != "fw_flat_out"}
    with tracectx(forward):
        prims.python_return({**entries, "output": outputs, "flat_output": tuple(outputs)}, saved)
    return forward


def _cotangents(result: dict[str, Any], tangents: Sequence[BoundSymbol]) -> list[Any]:
    """Return the tangent of each output. If forward returns a value several times, its tangents are in reverse
    order."""
    by_output: dict[str, list[Any]] = {}
    for line in tangents:
        by_output.setdefault(line.args[0].name, []).append(line.output)
    outputs = (
        by_output.get(output.name) if isinstance(output, TensorProxy) else None for output in result["fw_flat_out"]
    )
    return [tangents_left.pop() if tangents_left else None for tangents_left in outputs]


def _make_backward(
    forward: TraceCtx, lines: Sequence[BoundSymbol], gradients: Sequence[Any], saved: Any, cotangents: list[Any]
) -> TraceCtx:
    """Return the backward trace, which unpacks the values that forward saved, and the tangents."""

    def backward_fn(saved_for_backward: Any, cotangents: Any) -> None:
        """Define the signature of the trace."""

    backward = TraceCtx(fn=backward_fn)
    backward.tags.add(TraceTag.BACKWARD)
    backward.names, backward.name_ctr = forward.names, forward.name_ctr
    backward.names -= {"saved_for_backward", "cotangents"}
    with tracectx(backward):
        parts = [CollectionProxy(list(part), name=name) for part, name in zip(saved, ("C0", "C1"), strict=True)]
        all_saved = CollectionProxy(list(parts), name="saved_for_backward")
        tangents = CollectionProxy(cotangents, name="cotangents")
        backward.args = ([part.collection() for part in parts], tangents.collection())
        for collection in (all_saved, tangents):
            prims.unpack_trivial(collection, name=collection.name)
        for collection in (all_saved, tangents, *parts):
            prims.unpack_sequence(collection, len(collection.coll))
        backward.bound_symbols += lines
        prims.python_return(tuple(gradients))
    backward.bound_symbols = _needed_lines(backward.bound_symbols)
    return backward


def _needed_lines(lines: Sequence[BoundSymbol]) -> list[BoundSymbol]:
    """Return the lines that the last line needs, and lines with side effects."""
    makers: dict[str, int] = {}
    for index, line in enumerate(lines):
        for proxy in line.flat_proxy_outs:
            makers.setdefault(proxy.name, index)
    needed: set[str] = set()
    kept = []
    for index, line in reversed(list(enumerate(lines))):
        makes = any(proxy.name in needed and makers[proxy.name] == index for proxy in line.flat_proxy_outs)
        if makes or prims.OpTags.DONT_DCE in gather_tags(line):
            needed.update(proxy.name for proxy in line.flat_proxy_args)
            kept.append(line)
    return kept[::-1]


def add_frees(trace: TraceCtx) -> TraceCtx:
    """Return the trace with a ``del`` after the last use of each value. In backward, argument lists are cleared before
    their ``del``."""
    *lines, end = trace.bound_symbols
    used = {proxy.name for proxy in proxies_in(end.args)}
    clears = TraceTag.BACKWARD in trace.tags
    reversed_lines = [end]
    for line in reversed(lines):
        if line.sym.id not in NO_USES:
            values = (*line.flat_proxy_outs, *line.flat_proxy_args)
            unused = tuple({proxy.name: proxy for proxy in values if proxy.name not in used}.values())
            used.update(proxy.name for proxy in unused)
            reversed_lines += reversed(list(_frees(unused, clears=clears)))
        reversed_lines.append(line)
    new = from_trace(trace)
    new.bound_symbols = reversed_lines[::-1]
    new.set_provenance(TraceProvenance("Delete Last Used"))
    return new


def _frees(unused: tuple[Proxy, ...], *, clears: bool) -> Iterable[BoundSymbol]:
    for proxy in reversed(unused) if clears else ():
        if isinstance(proxy, CollectionProxy):
            yield clear_mutable_collection.bind(proxy, output=None)
    if unused:
        yield BoundSymbol(prims.python_del, unused, {}, None)

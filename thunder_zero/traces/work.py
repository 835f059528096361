"""Classifies the work of a line (matmul, view, ...), finds views, counts FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from thunder_zero.compat.thunders_work import NOT_CHEAP, OF_ROWS, VIEWS, WORK, flops_of_symbol
from thunder_zero.schedule.timeline import Work
from thunder_zero.traces.operators import flops_of_line, is_cheap_line, is_view, operator_of, work_of_operator

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, gather_tags

NOT_REPEATABLE = {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE, prims.OpTags.DONT_DCE}
HEAVIEST_FIRST = {work: index for index, work in enumerate(Work)}


def work_of(line: BoundSymbol) -> Work:
    """Return the class of work of a line, from its name or its heaviest subsymbol; OTHER if it has no subsymbols."""
    if (operator := operator_of(line)) is not None:
        return work_of_operator(operator)
    name = line.sym.name
    if name in WORK:
        return WORK[name]
    if draws_random_numbers(name):
        return Work.RANDOM
    return min(map(work_of, line.subsymbols), key=HEAVIEST_FIRST.__getitem__, default=Work.OTHER)


def is_cheap(line: BoundSymbol) -> bool:
    """Return whether a line only does pointwise work, makes views, or reduces the last dimensions."""
    if operator_of(line) is not None:
        return is_cheap_line(line)
    name = line.sym.name
    if WORK.get(name) in (Work.POINTWISE, Work.VIEW):
        return NOT_CHEAP.isdisjoint(symbol_names(line))
    if line.subsymbols:
        return all(map(is_cheap, line.subsymbols))
    return name == "native_layer_norm" or (name in OF_ROWS and _reduces_last(line))


def makes_view(line: BoundSymbol) -> bool:
    """Return whether the outputs of a line are views of its first tensor."""
    operator = operator_of(line)
    return line.sym.name in VIEWS if operator is None else is_view(operator)


def is_repeatable(line: BoundSymbol) -> bool:
    """Return whether running a line twice gives equal values and has no side effect."""
    if operator_of(line) is not None:
        return NOT_REPEATABLE.isdisjoint(line.sym.tags or ()) and NOT_REPEATABLE.isdisjoint(line.tags)
    if line.sym in (prims.python_return, prims.get_grad) or gather_tags(line) & NOT_REPEATABLE:
        return False
    return not any(name == "copy_" or draws_random_numbers(name) for name in symbol_names(line))


def _reduces_last(line: BoundSymbol) -> bool:
    """Return whether a reduction is over the last dimensions, but not over all dimensions."""
    rank = line.args[0].ndim
    dims = line.args[1] if len(line.args) > 1 else next(iter(line.kwargs.values()), None)
    reduced = {dims % rank} if isinstance(dims, int) and rank else {dim % rank for dim in dims or ()}
    return 0 < len(reduced) < rank and reduced == set(range(rank - len(reduced), rank))


def updated_by(line: BoundSymbol) -> Iterator[Proxy]:
    """Yield the tensors to which a line writes in place, and tensors that share their memory."""
    if line.sym.name == "copy_":
        yield line.args[1]
    elif line.sym.name == "update_aliases" or prims.OpTags.IN_PLACE in (line.sym.tags or ()):
        yield from line.flat_proxy_args
    for inner in line.subsymbols:
        yield from updated_by(inner)


def symbol_names(line: BoundSymbol) -> Iterator[str]:
    """Yield the name of a line, and the names of all its subsymbols."""
    yield line.sym.name
    for inner in line.subsymbols:
        yield from symbol_names(inner)


@cache
def draws_random_numbers(name: str) -> bool:
    """Return whether an operator draws random numbers, according to our table or torch's tags. Thunder's tags are
    incomplete."""
    if WORK.get(name) is Work.RANDOM:
        return True
    packet: Any = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def flops_of(line: BoundSymbol) -> int:
    """Return the FLOPs of a line, from its name or as the sum over its subsymbols; 0 for an unknown name."""
    if operator_of(line) is not None:
        return flops_of_line(line)
    count = flops_of_symbol(line)
    return sum(map(flops_of, line.subsymbols)) if count is None else count

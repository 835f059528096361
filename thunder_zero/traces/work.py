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
HEAVIEST_FIRST = {work: number for number, work in enumerate(Work)}


def work_of(bsym: BoundSymbol) -> Work:
    """The class of work of a line: by its own name, or else that of its heaviest subsymbol; OTHER if it has none."""
    if (operator := operator_of(bsym)) is not None:
        return work_of_operator(operator)
    name = bsym.sym.name
    if name in WORK:
        return WORK[name]
    if draws_random_numbers(name):
        return Work.RANDOM
    return min(map(work_of, bsym.subsymbols), key=HEAVIEST_FIRST.__getitem__, default=Work.OTHER)


def is_cheap(bsym: BoundSymbol) -> bool:
    """Whether a line does pointwise work, makes views, or reduces the last dimensions, and nothing else."""
    if operator_of(bsym) is not None:
        return is_cheap_line(bsym)
    name = bsym.sym.name
    if WORK.get(name) in (Work.POINTWISE, Work.VIEW):
        return NOT_CHEAP.isdisjoint(symbol_names(bsym))
    if bsym.subsymbols:
        return all(map(is_cheap, bsym.subsymbols))
    return name == "native_layer_norm" or (name in OF_ROWS and _reduces_last(bsym))


def makes_view(bsym: BoundSymbol) -> bool:
    """Whether the outputs of a line are views of its first tensor."""
    operator = operator_of(bsym)
    return bsym.sym.name in VIEWS if operator is None else is_view(operator)


def is_repeatable(bsym: BoundSymbol) -> bool:
    """Whether running a line twice gives the same values and has no side effect."""
    if operator_of(bsym) is not None:
        return NOT_REPEATABLE.isdisjoint(bsym.sym.tags or ()) and NOT_REPEATABLE.isdisjoint(bsym.tags)
    if bsym.sym in (prims.python_return, prims.get_grad) or gather_tags(bsym) & NOT_REPEATABLE:
        return False
    return not any(name == "copy_" or draws_random_numbers(name) for name in symbol_names(bsym))


def _reduces_last(bsym: BoundSymbol) -> bool:
    """Whether a reduction is over the last dimensions, but not over all of them."""
    rank = bsym.args[0].ndim
    dims = bsym.args[1] if len(bsym.args) > 1 else next(iter(bsym.kwargs.values()), None)
    over = {dims % rank} if isinstance(dims, int) and rank else {dim % rank for dim in dims or ()}
    return 0 < len(over) < rank and over == set(range(rank - len(over), rank))


def updated_by(bsym: BoundSymbol) -> Iterator[Proxy]:
    """The tensors that a line writes to in place, or that share memory with those."""
    if bsym.sym.name == "copy_":
        yield bsym.args[1]
    elif bsym.sym.name == "update_aliases" or prims.OpTags.IN_PLACE in (bsym.sym.tags or ()):
        yield from bsym.flat_proxy_args
    for inner in bsym.subsymbols:
        yield from updated_by(inner)


def symbol_names(bsym: BoundSymbol) -> Iterator[str]:
    """The name of a line, and of all its subsymbols."""
    yield bsym.sym.name
    for inner in bsym.subsymbols:
        yield from symbol_names(inner)


@cache
def draws_random_numbers(name: str) -> bool:
    """Whether our table has the operator as random, or torch tags it as seeded; Thunder does not tag all of them."""
    if WORK.get(name) is Work.RANDOM:
        return True
    packet: Any = getattr(torch.ops.aten, name, None)
    if packet is None:
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def flops_of(bsym: BoundSymbol) -> int:
    """FLOPs of a line: by its own name, or else the sum of its subsymbols'. 0 for a name that nobody knows."""
    if operator_of(bsym) is not None:
        return flops_of_line(bsym)
    count = flops_of_symbol(bsym)
    return sum(map(flops_of, bsym.subsymbols)) if count is None else count

"""Classifies the work of a line (matmul, view, ...), finds views, counts FLOPs.

A line calls an operator of torch, one of our symbols or a primitive, or is a region of operators.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder_zero.schedule.ops import Work
from thunder_zero.traces.operators import flops_of_line, is_cheap_line, is_view, operator_of, work_of_operator

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, gather_tags

NOT_REPEATABLE = {prims.OpTags.RANDOM_OP, prims.OpTags.IN_PLACE, prims.OpTags.DONT_DCE}
HEAVIEST_FIRST = {work: index for index, work in enumerate(Work)}
CAST = "zero_cast"
NO_WORK = (prims.python_return, prims.get_grad)


def work_of(line: BoundSymbol) -> Work:
    """Return the class of work of a line, or of the heaviest line of a region."""
    if (operator := operator_of(line)) is not None:
        return work_of_operator(operator)
    if line.sym.name == CAST:
        return Work.POINTWISE
    if line.sym in NO_WORK:
        return Work.NONE
    return min(map(work_of, line.subsymbols), key=HEAVIEST_FIRST.__getitem__, default=Work.OTHER)


def is_cheap(line: BoundSymbol) -> bool:
    """Return whether a line only does pointwise work, makes views, or reduces the last dimensions."""
    if operator_of(line) is not None:
        return is_cheap_line(line)
    return line.sym.name == CAST or (bool(line.subsymbols) and all(map(is_cheap, line.subsymbols)))


def makes_view(line: BoundSymbol) -> bool:
    """Return whether the outputs of a line are views of its first tensor."""
    return is_view(operator_of(line))


def is_repeatable(line: BoundSymbol) -> bool:
    """Return whether running a line twice gives equal values and has no side effect."""
    if operator_of(line) is not None:
        return NOT_REPEATABLE.isdisjoint(line.sym.tags or ()) and NOT_REPEATABLE.isdisjoint(line.tags)
    return line.sym not in NO_WORK and not gather_tags(line) & NOT_REPEATABLE


def updated_by(line: BoundSymbol) -> Iterator[Proxy]:
    """Yield the tensors to which a line writes in place, and tensors that share their memory."""
    if prims.OpTags.IN_PLACE in (line.sym.tags or ()):
        yield from line.flat_proxy_args
    for inner in line.subsymbols:
        yield from updated_by(inner)


def flops_of(line: BoundSymbol) -> int:
    """Return the FLOPs of a line, or of all lines of a region."""
    return flops_of_line(line) if operator_of(line) is not None else sum(map(flops_of, line.subsymbols))

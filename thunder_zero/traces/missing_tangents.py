"""Removes the operations of backward that compute only from missing tangents.

A loss need not use all outputs of a model. In eager mode, parameters that reach only unused outputs then keep ``grad is
None``. Backward is linear in its tangents, so a value computed only from missing tangents is zero::

    t5 = get_grad(logits)                          # missing
    t6 = torch.ops.aten.mm.default(t5, w)          # removed
    t8 = torch.ops.aten.add.Tensor(t6, t7)   ->    t7 replaces t8
    p9 = zero_reduce_scatter(t6, 'head.w')         # removed; the gradient is None

All other lines keep their order, so the values that forward saves suffice. A line that reads zeros and other values,
and is not a sum, gets materialized zeros. The backward of a user's autograd function may return nonzero values for a
missing tangent. If a line reads such a result and other values, the result is computed from a materialized zero.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from thunder_zero.schedule.ops import Compute, Defer, Gather, Op, Reduce, Return, Wait, ends, reading
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import computation
from thunder_zero.traces.operators import is_view, operator_of
from thunder_zero.traces.operators import line as make_line
from thunder_zero.traces.symbols import SymbolicShape
from thunder_zero.traces.write import Writer

from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.symbol import BoundSymbol

_KEEP_ZEROS = """
    mul neg sum mean mm bmm t clone _to_copy detach index_select gather repeat flip roll embedding_dense_backward
    view_as_real view_as_complex
"""
KEEP_ZEROS = frozenset(_KEEP_ZEROS.split())


def drop_tangents(timeline: Timeline, missing: Collection[str], writer: Writer) -> Timeline:
    """Return the timeline without the operations that compute only from the tangents named in ``missing``."""
    pruning = _Pruning(timeline, missing, writer)
    remaining = timeline.with_ops(_drop_unread([new for op in timeline.ops for new in pruning.remaining(op)]))
    gradients = tuple((path, name) for path, name in timeline.gradients if path not in pruning.lost)
    return replace(remaining, tangents=timeline.tangents.difference(missing), gradients=gradients)


class _Pruning:
    """The facts about the values of a timeline so far, whose operations :meth:`remaining` takes in order."""

    def __init__(self, timeline: Timeline, missing: Collection[str], writer: Writer) -> None:
        self.timeline, self.writer = timeline, writer
        self.zero = set(missing)
        self.has_tangent = set(timeline.tangents.difference(missing))  # values that depend on a tangent
        self.replaced_by: dict[str, str] = {}
        self.kept: dict[str, list[bool]] = {}  # handle of a reduction -> for each tensor, whether it is not zero
        self.lost: set[str] = set()  # paths of parameters without a gradient
        self.left_out: dict[str, Compute] = {}  # removed value that may not be zero -> what would compute it

    def remaining(self, op: Op) -> Iterator[Op]:
        """Yield the operation after the operations that it needs, pruned; or nothing if its results are zero."""
        if not op.backward:
            yield op
            return
        op = reading(op, self.replaced_by)
        match op:
            case Compute():
                yield from self._computation(op)
            case Reduce():
                self.kept[op.handle] = mask = [name not in self.zero for name in op.reads]
                if not self.timeline.is_second_reduction(op):
                    self.lost.update(_where([not keeps for keeps in mask], op.params))
                if any(mask):
                    yield replace(op, reads=_where(mask, op.reads), params=_where(mask, op.params))
            case Wait(launch=Reduce(handle=handle)):
                mask = self.kept[handle]
                self.zero.update(_where([not keeps for keeps in mask], op.writes))
                if any(mask):
                    yield replace(op, writes=_where(mask, op.writes))
            case Defer() if not self.zero.isdisjoint(op.reads):
                self.lost.update(op.params)
                self.zero.update(op.writes)
            case Return():
                yield replace(op, results=tuple(None if name in self.zero else name for name in op.results))
            case _:
                yield op

    def _computation(self, op: Compute) -> Iterator[Op]:
        """Yield a computation after the zeros that it reads, or nothing if its result is zero or equals an operand."""
        line = self.writer.computation(op)
        zeros = [name for name in op.reads if name in self.zero]
        if not zeros or not self.has_tangent.isdisjoint(op.reads):
            if not self.has_tangent.isdisjoint(op.reads):
                self.has_tangent.update(op.writes)
        else:
            self.zero.update(op.writes)
            if not _keeps_zeros(line) or not self.left_out.keys().isdisjoint(zeros):
                self.left_out |= dict.fromkeys(op.writes, op)
            return
        if self.left_out.keys().isdisjoint(zeros) and zeros and (kept := _nonzero_operand(line, zeros)) is not None:
            self.replaced_by[op.writes[0]] = kept
            return
        yield from self._made(zeros)
        yield op

    def _made(self, names: Sequence[str]) -> Iterator[Op]:
        """Yield the operations that compute the values in ``names`` from materialized zeros."""
        for name in names:
            if name not in self.zero:
                continue
            if name not in self.left_out:
                yield self._zero(name)
                continue
            maker = self.left_out[name]
            yield from self._made(maker.reads)
            self.zero.difference_update(maker.writes)
            self.has_tangent.update(maker.writes)
            yield maker

    def _zero(self, name: str) -> Op:
        """Return an operation that materializes a zero. From then on, the value is not in ``zero``."""
        proxy: Any = self.writer.proxies[name]
        args, dtype, device = [*map(int, proxy.shape)], to_torch_dtype(proxy.dtype), to_torch_device(proxy.device)
        if shape := self.writer.facts.symbolic_shapes.get(name):
            line = make_line(_zeros_of(name, shape, dtype, device), tuple(shape.numbers.values()), {}, proxy)
        else:
            line = make_line(torch.ops.aten.zeros.default, (args,), {"dtype": dtype, "device": device}, proxy)
        self.zero.discard(name)
        self.has_tangent.add(name)
        return computation(line, backward=True)


def _keeps_zeros(line: BoundSymbol) -> bool:
    """Return whether an operator's result is zero if one of its operands is zero; False if unknown."""
    target = operator_of(line)
    name = line.sym.name
    return target is operator.getitem or is_view(target) or name.endswith("_backward") or name in KEEP_ZEROS


def _zeros_of(name: str, shape: SymbolicShape, dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that creates zeros, given the values of the shape's symbols. Each function's name is unique."""

    def zeros(*numbers: int) -> torch.Tensor:
        return torch.zeros(shape.of(*numbers), dtype=dtype, device=device)

    zeros.__name__ = f"zeros_{name}"
    return zeros


def _where(mask: Sequence[bool], items: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(item for item, keeps in zip(items, mask, strict=True) if keeps)


def _nonzero_operand(line: BoundSymbol, zeros: Collection[str]) -> str | None:
    """Return the operand that a sum equals because all its other operands are zero, or None."""
    if operator_of(line) is not torch.ops.aten.add.Tensor or line.kwargs or len(line.flat_proxy_args) != 2:
        return None
    kept = next((proxy for proxy in line.flat_proxy_args if proxy.name not in zeros), None)
    is_equal = kept is not None and (kept.shape, kept.dtype) == (line.output.shape, line.output.dtype)
    return kept.name if kept is not None and is_equal else None


def _drop_unread(ops: Sequence[Op]) -> list[Op]:
    """Drop the operations of backward whose results no operation reads, and parameters that none reads."""
    needed: set[str] = set()
    masks: dict[str, list[bool]] = {}  # handle of a gather -> for each parameter, whether it is read
    kept_ops: list[Op] = []
    for op in reversed(ops):
        may_go = isinstance(op, Gather) or ends(op, Gather) or (isinstance(op, Compute) and op.repeatable)
        if op.backward and op.writes and needed.isdisjoint(op.writes) and may_go:
            continue
        if op.backward and ends(op, Gather):
            mask = masks[op.launch.handle] = [name in needed for name in op.writes]
            op = replace(op, writes=_where(mask, op.writes))
        elif isinstance(op, Gather) and op.handle in masks:
            mask = masks[op.handle]
            op = replace(op, reads=_where(mask, op.reads), params=_where(mask, op.params))
        needed.update(op.reads)
        kept_ops.append(op)
    return kept_ops[::-1]

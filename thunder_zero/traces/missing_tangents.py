"""Removes the lines of a joint trace that compute only from missing tangents.

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
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from thunder_zero.schedule.timeline import Kind, Op, Timeline
from thunder_zero.traces.lift import emit, lift, read_by
from thunder_zero.traces.operators import is_view, operator_of
from thunder_zero.traces.operators import line as make_line
from thunder_zero.traces.pipeline import Scheduled
from thunder_zero.traces.symbols import Facts, SymbolicShape

from thunder.core import prims
from thunder.core.devices import to_torch_device
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx

_KEEP_ZEROS = """
    mul neg sum mean mm bmm t clone _to_copy detach index_select gather repeat flip roll embedding_dense_backward
    view_as_real view_as_complex
"""
KEEP_ZEROS = frozenset(_KEEP_ZEROS.split())


def drop_tangents(scheduled: Scheduled, missing: Collection[str]) -> Scheduled:
    """Return the trace without the lines that compute only from the tangents named in ``missing``."""
    facts = scheduled.facts
    timeline = lift(scheduled.trace, facts, coded=True)
    pruned = _Pruning(scheduled.trace, facts, timeline, set(missing))
    ops = _drop_unread(list(pruned.remaining_ops()))
    new = from_trace(scheduled.trace)
    new.bound_symbols = pruned.lines
    result = emit(new, timeline.with_ops(ops), facts.executor)
    return replace(scheduled, trace=result, trained=scheduled.trained - frozenset(pruned.lost))


@dataclass
class _Pruning:
    """A joint trace that is being pruned, and the facts about its values so far.

    Attributes:
        trace: the joint trace.
        facts: the facts of its program.
        timeline: the timeline of the trace.
        zero: values that are zero.
        has_tangent: values that depend on tangents that are not missing.
        replaced_by: a mapping from values to their replacements.
        kept: a mapping from handles to bools, one for each tensor: True if the tensor is not zero.
        lost: paths of parameters without a gradient.
        left_out: removed values that may not be zero, mapped to the operations that would compute them.
    """

    trace: TraceCtx
    facts: Facts
    timeline: Timeline
    zero: set[str]
    has_tangent: set[str] = field(default_factory=set)
    replaced_by: dict[str, str] = field(default_factory=dict)
    kept: dict[str, list[bool]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    left_out: dict[str, Op] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lines: list[BoundSymbol] = list(self.trace.bound_symbols)
        self.executor = self.facts.executor

    def remaining_ops(self) -> Iterator[Op]:
        """Yield the remaining operations, in order."""
        for op in self.timeline.ops:
            line = self.lines[op.source[0]]
            op = replace(op, reads=tuple(self.replaced_by.get(name, name) for name in op.reads))
            if line.sym is prims.get_grad:
                if op.writes[0] not in self.zero:
                    self.has_tangent.update(op.writes)
                    yield op
            elif line.sym is prims.python_return:
                yield from self._reduce_lost(op)
                yield self._prune_return(op, line)
            elif op.kind is Kind.WAIT or op.kind is Kind.REDUCE or op.kind is Kind.DEFER:
                yield from self._prune_collective(op)
            elif line.sym == self.executor.reduce_deferred:
                yield self._with_line(op, line.from_bsym(args=((*line.args[0], *self.lost),)))
            elif line.sym in (self.executor.check_finite, self.executor.wait_offloaded):
                yield from self._prune_end(op, line)
            else:
                yield from self._prune_computation(op, line)

    def _prune_computation(self, op: Op, line: BoundSymbol) -> Iterator[Op]:
        """Yield a computation after the zeros that it reads, or nothing if its result is zero or equals an operand."""
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
            self.replaced_by[op.writes[0]] = self.replaced_by.get(kept, kept)
            return
        yield from self._make_read(op, line, zeros)
        yield op

    def _make_read(self, op: Op, line: BoundSymbol, names: Sequence[str]) -> Iterator[Op]:
        """Yield the operations that compute the values in ``names`` from materialized zeros."""
        for name in names:
            if name not in self.zero:
                continue
            if name not in self.left_out:
                yield self._make_zero(op, line, name)
                continue
            maker = self.left_out[name]
            yield from self._make_read(maker, self.lines[maker.source[0]], maker.reads)
            self.zero.difference_update(maker.writes)
            self.has_tangent.update(maker.writes)
            yield maker

    def _make_zero(self, op: Op, line: BoundSymbol, name: str) -> Op:
        """Return an operation that materializes a zero. From then on, the value is not in ``zero``."""
        proxy = next(arg for arg in line.flat_proxy_args if self.replaced_by.get(arg.name, arg.name) == name)
        args, dtype, device = [*map(int, proxy.shape)], to_torch_dtype(proxy.dtype), to_torch_device(proxy.device)
        if shape := self.facts.shapes.get(proxy.name):
            new_line = make_line(_zeros_of(proxy.name, shape, dtype, device), tuple(shape.numbers.values()), {}, proxy)
        else:
            new_line = make_line(torch.ops.aten.zeros.default, (args,), {"dtype": dtype, "device": device}, proxy)
        new_line.tags.add(BoundSymbolTag.BACKWARD)
        self.zero.discard(name)
        self.has_tangent.add(name)
        self.lines.append(new_line)
        return Op(
            Kind.COMPUTE,
            tuple(read_by(new_line)),
            (name,),
            backward=True,
            source=(len(self.lines) - 1,),
            repeatable=True,
        )

    def _prune_collective(self, op: Op) -> Iterator[Op]:
        """Yield a reduction, its wait, or a deferral for the gradients that are not zero. Waits of gathers are
        kept."""
        if op.kind is Kind.WAIT:
            mask = self.kept.get(op.reads[0], [True] * len(op.writes))
            self.zero.update(name for name, keeps in zip(op.writes, mask, strict=True) if not keeps)
            reads, writes = op.reads, _where(mask, op.writes)
        else:
            mask = [name not in self.zero for name in op.reads]
            if not self.timeline.continues(op):
                self.lost += _where([not keeps for keeps in mask], op.params)
            self.kept[op.writes[0]] = mask
            reads, writes = _where(mask, op.reads), op.writes
            if op.kind is Kind.DEFER and not any(mask):
                self.zero.update(op.writes)
        if any(mask):
            yield replace(op, reads=reads, writes=writes, params=_where(mask, op.params))

    def _prune_end(self, op: Op, line: BoundSymbol) -> Iterator[Op]:
        """Yield a line that reads all reduced gradients, restricted to the remaining gradients."""
        mask = [proxy.name not in self.zero for proxy in line.args[0]]
        if any(mask):
            yield self._with_line(op, line.from_bsym(args=tuple(_where(mask, arg) for arg in line.args)))

    def _reduce_lost(self, op: Op) -> Iterator[Op]:
        """Yield a line that reduces the deferred gradients (``no_sync``) of parameters without a gradient, unless the
        trace already has a line for deferred gradients."""
        reduces = any(line.sym == self.executor.reduce_deferred for line in self.lines)
        if self.lost and self.facts.synced and not reduces:
            with tracectx(self.trace):
                yield self._with_line(op, self.executor.reduce_deferred.bind(tuple(self.lost), output=None))

    def _prune_return(self, op: Op, line: BoundSymbol) -> Op:
        """Return the operation of the trace's return, with None for gradients that are zero."""
        result = dict(line.args[0])
        is_zero = [isinstance(grad, Proxy) and grad.name in self.zero for grad in result["output"]]
        grads = [None if zero else grad for grad, zero in zip(result["output"], is_zero, strict=True)]
        with tracectx(self.trace):
            new = prims.python_return.bind({**result, "output": tuple(grads)}, output=None)
        return self._with_line(op, new)

    def _with_line(self, op: Op, line: BoundSymbol) -> Op:
        self.lines.append(line)
        return replace(
            op, reads=tuple(self.replaced_by.get(name, name) for name in read_by(line)), source=(len(self.lines) - 1,)
        )


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
    """Drop the operations of backward whose results no operation reads."""
    needed: set[str] = set()
    masks: dict[str, list[bool]] = {}  # handle of a gather -> for each parameter, whether it is read
    reductions = {op.writes[0] for op in ops if op.kind is Kind.REDUCE}
    kept_ops = []
    for op in reversed(ops):
        if op.backward and op.writes and needed.isdisjoint(op.writes):
            is_gathers = op.kind is Kind.GATHER or (op.kind is Kind.WAIT and op.reads[0] not in reductions)
            if is_gathers or (op.kind is Kind.COMPUTE and op.repeatable):
                continue
        if op.backward and op.kind is Kind.WAIT and op.reads[0] not in reductions:
            mask = masks[op.reads[0]] = [name in needed for name in op.writes]
            op = replace(op, writes=_where(mask, op.writes), params=_where(mask, op.params))
        elif op.kind is Kind.GATHER and op.writes[0] in masks:
            mask = masks[op.writes[0]]
            op = replace(op, reads=_where(mask, op.reads), params=_where(mask, op.params))
        needed.update(op.reads)
        kept_ops.append(op)
    return kept_ops[::-1]

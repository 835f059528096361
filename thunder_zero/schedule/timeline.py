"""What happens when, one operation a line: frozen data that passes rewrite and reports read.

A timeline holds both halves of a step, forward first::

    gather   fut0 <- t_w            h.0.w        launch: starts an all-gather of shards
    wait     w    <- fut0           h.0.w        ends it: the full parameter is there
    compute  y    <- x, w
    free     w
    ...                                          -- backward --
    gather   fut1 <- t_w            h.0.w        again
    wait     w_   <- fut1           h.0.w
    compute  gx   <- gy, w_
    compute  gw   <- gy, x
    reduce   fut2 <- gw             h.0.w        all-reduce or reduce-scatter, by the plan
    free     w_
    wait     g    <- fut2           h.0.w
    compute  <- y, g                             the return

Values are names; what they weigh stands in ``Timeline.values``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from thunder_zero import layout
from thunder_zero.plan import Param, Plan

if TYPE_CHECKING:
    import torch


class Kind(StrEnum):
    """What an operation does."""

    GATHER = "gather"
    REDUCE = "reduce"
    DEFER = "defer"
    WAIT = "wait"
    COMPUTE = "compute"
    FREE = "free"


LAUNCHES = (Kind.GATHER, Kind.REDUCE)


class Work(StrEnum):
    """What class of work an operation does on the device, heaviest first: a fused region has that of its heaviest part.

    Collectives, waits and frees do NONE, and OTHER is work of an unknown class. VIEW only makes another shape or other
    strides of the same memory, as far as strides allow. POINTWISE includes copies and constants.
    """

    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    MATMUL = "matmul"
    OTHER = "other"
    INDEX = "index"
    REDUCTION = "reduction"
    RANDOM = "random"
    POINTWISE = "pointwise"
    VIEW = "view"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        kind: what it does.
        reads: values that it needs. GATHER: shards; REDUCE: full gradients; WAIT: one handle;
            FREE: what it frees; DEFER: a full gradient, which a later backward reduces (``no_sync``).
        writes: values that it makes. GATHER and REDUCE: one handle; WAIT: one value a parameter; DEFER: the gradient
            that is returned in its place, which is none.
        params: paths of the parameters that travel (GATHER, REDUCE, WAIT), in the order of
            ``reads`` of the launch and of ``writes`` of the wait; of FREE: whose memory it is; of DEFER:
            whose gradient.
        backward: it runs in the backward half.
        repeatable: COMPUTE only: running it twice gives the same values and does no harm (not
            random, nothing in place), so that backward may compute it again.
        again: a copy of an operation of forward: gathers or computes anew what was freed.
        source: positions in the trace that it was lifted from; several after bucketing. FREE: ().
        work: COMPUTE only: what class of work it does.
    """

    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    backward: bool = False
    repeatable: bool = False
    again: bool = False
    source: tuple[int, ...] = ()
    work: Work = Work.NONE


@dataclass(frozen=True, slots=True)
class Value:
    """What a value weighs.

    Attributes:
        nbytes: bytes of its memory (of a handle: of what is under way).
        dtype: name of its dtype, ``"float32"``.
        base: the value whose memory it views; "" if its memory is its own, as far as is known.
    """

    nbytes: int
    dtype: str
    base: str = ""

    def copied(self, names: Mapping[str, str]) -> Value:
        """The same of a copy, given the names of the copies: a copy of a view views the copy."""
        return replace(self, base=names[self.base]) if self.base in names else self


@dataclass(frozen=True)
class Timeline:
    """Operations in the order in which they run, forward half first.

    Attributes:
        ops: the operations; the last one is the return.
        values: what each value weighs, also of values that no operation writes (inputs).
        plan: what each parameter is.
        inputs: values that are there before the first operation, or that backward is given. A parameter (its shard,
            or all of it where it is replicated) has its path; data and the gradients of outputs have None.
        gradients: what backward returns as gradients of parameters: path and value, for each input that gets one.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    plan: Plan
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    gradients: tuple[tuple[str, str], ...] = ()

    @cached_property
    def replicated(self) -> frozenset[str]:
        """Inputs that are replicated parameters; both halves may read them, so what depends on them and on gathered
        parameters alone can be computed again."""
        by_name = self.plan.by_name
        return frozenset(name for name, path in self.inputs.items() if path is not None and not by_name[path].sharded)

    @cached_property
    def cast(self) -> frozenset[str]:
        """The replicated inputs that compute reads through a cast copy, which each half makes for itself."""
        return frozenset(name for name in self.replicated if self.plan.by_name[self.inputs[name] or ""].is_cast)

    @cached_property
    def launches(self) -> dict[str, Op]:
        """The GATHER or REDUCE that writes each handle."""
        return {op.writes[0]: op for op in self.ops if op.kind in LAUNCHES}

    def ends(self, op: Op, kind: Kind) -> bool:
        """Whether an operation is the WAIT that ends a launch of this kind (GATHER or REDUCE)."""
        return op.kind is Kind.WAIT and op.reads[0] in self.launches and self.launches[op.reads[0]].kind is kind

    def base_of(self, name: str) -> str:
        """The value whose memory a tensor occupies: itself, or what it views."""
        return self.values[name].base or name

    def with_ops(self, ops: Iterable[Op], values: Mapping[str, Value] | None = None) -> Timeline:
        """The same timeline with other operations (and further values)."""
        return replace(self, ops=tuple(ops), values={**self.values, **(values or {})})

    def params_of(self, op: Op) -> tuple[Param, ...]:
        """The parameters that travel with, or are freed by, an operation."""
        return tuple(self.plan.by_name[path] for path in op.params)

    def bytes_sent(self, op: Op) -> int:
        """Bytes that this rank sends for one operation."""
        if op.kind is Kind.GATHER:
            return sum(map(self.plan.gather_bytes, self.params_of(op)))
        if op.kind is Kind.REDUCE:
            return sum(map(self.plan.reduce_bytes, self.params_of(op)))
        return 0

    def wire_bytes(self, op: Op) -> int:
        """Bytes that the busiest rank sends, or receives, in one collective: the same answer on every rank.

        In a gather rank 0 sends most, which owns the most rows; in a reduce-scatter it receives most, and of the copies
        of a sharded model its rows are the most that are averaged.
        """
        return sum(self._busiest(op, param, self.plan) for param in self.params_of(op))

    def _busiest(self, op: Op, param: Param, plan: Plan) -> int:
        if not param.sharded:
            return plan.reduce_bytes(param)
        inside = (plan.world_size - 1) * prod(layout.shard_shape(param.shape, plan.world_size, 0))
        rows = layout.owned_numel(param.shape, plan.world_size, 0)
        across = layout.all_reduce_sends((rows,), plan.replicas) if op.kind is Kind.REDUCE else 0
        return (inside + across) * self.travels_in(op, param).itemsize

    def travels_in(self, op: Op, param: Param) -> torch.dtype:
        """The dtype in which a launch sends one of its parameters, or its gradient."""
        return param.compute_dtype if op.kind is Kind.GATHER else param.reduce_dtype

    def full_bytes(self, op: Op) -> int:
        """Bytes of the full parameters, or of the full gradients, that an operation handles."""
        of_gradients = op.kind in (Kind.REDUCE, Kind.DEFER) or self.ends(op, Kind.REDUCE)
        return sum(param.grad_bytes if of_gradients else param.full_bytes for param in self.params_of(op))


def gathered_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Bytes of gathered parameters alive after each operation.

    A gathered parameter takes its full bytes from the launch of its gather, where the buffer is allocated, to its
    FREE. Resident parameters (ZeRO-1) are there anyway and do not count. On backends whose own collectives send chunks
    of one size (NCCL), a parameter whose rows W does not divide takes up to W - 1 rows more. What an accumulation holds
    (``policy.gather_once_per_accumulation``) stays when the step ends, and is not counted after it.
    """
    alive, counts = 0, []
    for op in timeline.ops:
        full = sum(param.full_bytes for param in timeline.params_of(op) if not param.resident)
        alive += full if op.kind is Kind.GATHER else -full if op.kind is Kind.FREE else 0
        counts.append(alive)
    return tuple(counts)

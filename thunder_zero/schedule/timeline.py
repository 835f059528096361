"""The timeline of a step, one operation per line: frozen data that passes rewrite and reports read.

A timeline holds both phases of a step, forward first::

    gather   fut0 <- t_w            h.0.w        starts an all-gather of shards (a launch)
    wait     w    <- fut0           h.0.w        ends it: the full parameter can be read
    compute  y    <- x, w
    free     w
    ...                                          -- backward --
    gather   fut1 <- t_w            h.0.w        gathered again
    wait     w_   <- fut1           h.0.w
    compute  gx   <- gy, w_
    compute  gw   <- gy, x
    reduce   fut2 <- gw             h.0.w        all-reduce or reduce-scatter, by the plan
    free     w_
    wait     g    <- fut2           h.0.w
    compute  <- y, g                             the return

Values are names; ``Timeline.values`` has their sizes and dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from thunder_zero.encodings.encoding import Encoding
from thunder_zero.plan.amounts import size
from thunder_zero.plan.mesh import SHARD, TENSOR
from thunder_zero.plan.params import Param, Plan


class Kind(StrEnum):
    """The kinds of operations."""

    GATHER = "gather"
    REDUCE = "reduce"
    DEFER = "defer"
    WAIT = "wait"
    COMPUTE = "compute"
    FREE = "free"


LAUNCHES = (Kind.GATHER, Kind.REDUCE)
NUMBER = "number"  # the dtype of a Python number
MOST_NAMES = 8  # an error shows at most this many names of an operation


class Work(StrEnum):
    """Classes of work on the device, heaviest first: a fused region has the class of its heaviest part.

    NONE: collectives, waits, frees. OTHER: an unknown class. VIEW: another shape of the input's memory, if strides
        allow. POINTWISE includes copies and constants. INDEX: reads or writes positions that depend on data.
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
        kind: the kind of the operation.
        reads: values that the operation reads. GATHER: shards; REDUCE: full gradients; WAIT: one handle; FREE: the
            value that it frees; DEFER: a full gradient, which a later backward reduces (``no_sync``).
        writes: values that the operation writes. GATHER and REDUCE: one handle; WAIT: one value for each parameter;
            DEFER: a placeholder, which backward returns as the gradient (at run time it is None).
        params: paths of parameters. GATHER, REDUCE and WAIT: the parameters of the bucket, in the order of the launch's
            ``reads`` and of the wait's ``writes``; FREE: the parameter whose memory it frees; DEFER: the parameter
            whose gradient it defers.
        backward: True if the operation runs in backward.
        repeatable: COMPUTE only: True if running it twice gives equal values and has no side effect (not random,
            nothing in place), so that backward may compute it again.
        cheap: COMPUTE only: True if it is repeatable at little cost: views, pointwise work, reductions of rows.
        updates: COMPUTE only: values whose memory it overwrites, and values that may share this memory.
        repeated: True if the operation is a copy: it gathers or computes again a value that forward freed or did not
            save.
        source: indices of the operation's lines in the lifted trace. A bucket has several lines, a FREE has none. If
            the traces that run were lifted, they include the lines that encode for a launch or decode after a wait.
        work: COMPUTE only: the class of work.
        flops: COMPUTE only: FLOPs of its products, attention and convolutions; 0 for all other work.
        over: GATHER and REDUCE: the axis of the mesh. Over "replicate" and "tensor" a REDUCE reads the means of another
            REDUCE. COMPUTE: "tensor" for a collective of torch's tensor parallelism, and for its wait.
        sends: COMPUTE only: bytes that this rank sends in a collective of torch's tensor parallelism.
        moves: COMPUTE only: the kind of a collective of torch's tensor parallelism: "gather", "scatter", "all_reduce"
            or "all_to_all"; "" for its wait.
    """

    kind: Kind
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    backward: bool = False
    repeatable: bool = False
    repeated: bool = False
    source: tuple[int, ...] = ()
    work: Work = Work.NONE
    cheap: bool = False
    updates: tuple[str, ...] = ()
    flops: int = 0
    over: str = SHARD
    sends: int = 0
    moves: str = ""

    @property
    def launches(self) -> bool:
        """True if the operation launches a collective, of this package or of torch's tensor parallelism."""
        return self.kind in LAUNCHES or bool(self.moves)

    @property
    def waits(self) -> bool:
        """True if the operation waits for a collective."""
        return self.kind is Kind.WAIT or (self.is_torchs and not self.moves)

    @property
    def is_torchs(self) -> bool:
        """True if the operation is a collective of torch's tensor parallelism, or the wait for one."""
        return self.kind is Kind.COMPUTE and self.over == TENSOR


@dataclass(frozen=True, slots=True)
class Value:
    """The size and dtype of a value.

    Attributes:
        nbytes: bytes of the value's elements; for a handle, of the result in flight.
        dtype: name of the dtype, ``"float32"``; NUMBER for a Python number.
        base: the value whose memory this value views; "" if this value is not known to be a view.
    """

    nbytes: int
    dtype: str
    base: str = ""

    def copied(self, names: Mapping[str, str]) -> Value:
        """Return the size, dtype and base of a copy. A copied view is a view of its base's copy in ``names``."""
        return replace(self, base=names[self.base]) if self.base in names else self


@dataclass(frozen=True)
class Timeline:
    """Operations in the order in which they run, forward first.

    Attributes:
        ops: the operations; the last one is the return.
        values: size and dtype of each value, inputs included.
        plan: the plan of each parameter.
        inputs: a mapping from values that exist before the first operation, or that backward receives, to paths. Shards
            and replicated parameters have a path. Data, and the gradients of outputs, have None.
        gradients: (path, value) pairs of the gradients that backward returns for parameters.
    """

    ops: tuple[Op, ...]
    values: Mapping[str, Value]
    plan: Plan
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    gradients: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """Summarize the plan and, for each phase, the operations by kind and the bytes that this rank sends."""
        lines = [f"<Timeline: {len(self.ops)} operations, {self.plan!r}"]
        for phase in ("forward", "backward"):
            ops = [op for op in self.ops if op.backward is (phase == "backward")]
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(op.kind for op in ops).most_common())
            lines.append(f"  {phase}: {kinds or 'nothing'}; sends {size(sum(map(self.bytes_sent, ops)))}")
        return "\n".join(lines) + ">"

    @cached_property
    def replicated(self) -> frozenset[str]:
        """Inputs that are replicated parameters. Both phases may read them, so values that depend only on them and on
        gathered parameters can be computed again."""
        by_name = self.plan.by_name
        return frozenset(name for name, path in self.inputs.items() if path is not None and not by_name[path].sharded)

    @cached_property
    def cast(self) -> frozenset[str]:
        """Replicated inputs that operations read through a cast copy; each phase computes its own copy."""
        return frozenset(name for name in self.replicated if self.plan.by_name[self.inputs[name] or ""].is_cast)

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The values that are Python numbers: sizes that differ from call to call, which backward may read."""
        return frozenset(name for name, value in self.values.items() if value.dtype == NUMBER)

    @cached_property
    def writer(self) -> dict[str, int]:
        """A mapping from values, except inputs, to the index of the operation that writes them."""
        return {name: index for index, op in enumerate(self.ops) for name in op.writes}

    @cached_property
    def derived(self) -> dict[str, int]:
        """A mapping from values that depend on parameters alone (``derived.py``) to the index of their writer."""
        writers: dict[str, int] = {}
        without_data = {*self.replicated, *self.numbers}  # constants and derived values are added below
        for index, op in enumerate(self.ops):
            if op.kind is Kind.COMPUTE:
                if not op.repeatable or not without_data.issuperset(op.reads) or not self.numbers.isdisjoint(op.writes):
                    continue
                is_derived = not writers.keys().isdisjoint(op.reads) or not self.cast.isdisjoint(op.reads)
            elif self.ends(op, Kind.GATHER):
                is_derived = True
            else:
                continue
            without_data.update(op.writes)
            if is_derived:
                writers.update(dict.fromkeys(op.writes, index))
        return writers

    @cached_property
    def gathered(self) -> tuple[tuple[int, str, Param], ...]:
        """(index of the WAIT, value, parameter) tuples of the gathered parameters, in order."""
        waits = ((index, op) for index, op in enumerate(self.ops) if self.ends(op, Kind.GATHER))
        return tuple(
            (index, name, param)
            for index, op in waits
            for name, param in zip(op.writes, self.params_of(op), strict=True)
        )

    @cached_property
    def backward_start(self) -> int:
        """The index of backward's first operation, or of the return if there is no backward."""
        return sum(not op.backward for op in self.ops[:-1])

    @cached_property
    def launches(self) -> dict[str, Op]:
        """A mapping from handles to the GATHER or REDUCE that writes them."""
        return {op.writes[0]: op for op in self.ops if op.kind in LAUNCHES}

    @cached_property
    def collectives(self) -> dict[str, Op]:
        """A mapping from handles to the operations that start collectives, torch's tensor parallelism included."""
        return {op.writes[0]: op for op in self.ops if op.launches}

    def ends(self, op: Op, kind: Kind) -> bool:
        """Return whether an operation is the WAIT that ends a launch of this kind (GATHER or REDUCE)."""
        return op.kind is Kind.WAIT and op.reads[0] in self.launches and self.launches[op.reads[0]].kind is kind

    def is_continued(self, op: Op) -> bool:
        """Return whether an operation is the WAIT for intra-replica means, which another REDUCE reads."""
        return self.ends(op, Kind.REDUCE) and (
            self.launches[op.reads[0]].over != self.plan.reduced_over(self.params_of(op)[0])[-1]
        )

    def continues(self, op: Op) -> bool:
        """Return whether an operation is a REDUCE that reads the means of another REDUCE."""
        return op.kind is Kind.REDUCE and op.over != self.plan.reduced_over(self.params_of(op)[0])[0]

    def recomputes(self, op: Op) -> bool:
        """Return whether an operation recomputes a value that forward did not save; False for a derived value."""
        return op.kind is Kind.COMPUTE and op.repeated and self.derived.keys().isdisjoint(op.writes)

    def memory(self, name: str) -> str:
        """Return the value whose memory a value views, or the value itself."""
        value = self.values.get(name)
        return value.base or name if value else name

    def nbytes(self, name: str) -> int:
        """Return the bytes of a value's elements; 0 if it is not a tensor."""
        value = self.values.get(name)
        return value.nbytes if value else 0

    def with_ops(self, ops: Iterable[Op], values: Mapping[str, Value] | None = None) -> Timeline:
        """Return a timeline with the given operations, and with additional values."""
        return replace(self, ops=tuple(ops), values={**self.values, **(values or {})})

    def params_of(self, op: Op) -> tuple[Param, ...]:
        """Return the parameters that an operation moves or frees."""
        return tuple(self.plan.by_name[path] for path in op.params)

    def bytes_sent(self, op: Op) -> int:
        """Return the bytes that this rank sends in one operation."""
        if op.kind is Kind.GATHER:
            return sum(map(self.plan.gather_bytes, self.params_of(op)))
        if op.kind is Kind.REDUCE:
            return sum(
                self.plan.reduce_sends(param, op.over, self.plan.mesh.shard.place) for param in self.params_of(op)
            )
        return op.sends

    def wire_bytes(self, op: Op) -> int:
        """Return the bytes that rank 0 sends or receives in one collective, whichever is more. All ranks return the
        number of rank 0. Rank 0 is the busiest rank, since it owns the most rows. It sends most in a gather, receives
        most in a reduce-scatter, and averages most between replicas."""
        return sum(self._busiest(op, param) for param in self.params_of(op))

    def _busiest(self, op: Op, param: Param) -> int:
        plan = self.plan
        rows, peers = plan.geometry(param).numel_of(0), plan.mesh.shard.size - 1
        if op.kind is Kind.GATHER:
            return plan.gather_sends(param, 0)
        if op.over != SHARD or not param.sharded or plan.reduce_encoding(param, op.over).block:
            return plan.reduce_sends(param, op.over, 0)
        return peers * rows * param.reduce_dtype.itemsize  # rank 0 receives more than it sends

    def travels_as(self, op: Op, param: Param) -> Encoding:
        """Return the encoding in which a launch sends a parameter, or its gradient."""
        plan = self.plan
        return plan.gather_encoding(param) if op.kind is Kind.GATHER else plan.reduce_encoding(param, op.over)

    def full_bytes(self, op: Op) -> int:
        """Return the bytes of the full parameters that an operation moves or frees, or of the full gradients that it
        reduces."""
        reduces = op.kind in (Kind.REDUCE, Kind.DEFER) or self.ends(op, Kind.REDUCE)
        return sum(param.grad_bytes if reduces else param.full_bytes for param in self.params_of(op))


def overwritten(timeline: Timeline) -> frozenset[str]:
    """Return the values whose memory an operation overwrites, or may overwrite. No later operation may read them."""
    memory_of: dict[str, str] = {}  # value -> the first value that may have the same memory
    for op in timeline.ops:
        if op.work is Work.VIEW and op.reads:
            memory_of.update(dict.fromkeys(op.writes, memory_of.get(op.reads[0], op.reads[0])))
    changed = {memory_of.get(name, name) for op in timeline.ops for name in op.updates}
    return frozenset(changed.union(name for name, first in memory_of.items() if first in changed))


class ScheduleError(Exception):
    """A timeline breaks a rule. The message names the operation, its parameters and the rule, in one sentence."""


def fault(timeline: Timeline, index: int, rule: str) -> ScheduleError:
    """Return the error of the operation at ``index``. ``rule`` ends the message, such as "is never waited for"."""
    return ScheduleError(f"{name_of(timeline, index)} {rule}")


def name_of(timeline: Timeline, index: int) -> str:
    """Return the operation at ``index`` as errors name it: "op 22 (reduce 2.weight)"."""
    op = timeline.ops[index]
    names = op.params or op.writes or op.reads
    shown = ", ".join(names if len(names) <= MOST_NAMES else (*names[:MOST_NAMES], "..."))
    return f"op {index} ({op.kind} {shown})"

"""The timeline of a step, one operation per line: frozen data that passes rewrite and reports read.

A timeline holds both phases of a step, forward first::

    gather   fut0 <- t_w            h.0.w        starts an all-gather of shards (a launch)
    wait     w    <- fut0           h.0.w        ends it: the full parameter can be read
    compute  y    <- x, w
    free     w
    return   y                                   -- backward --
    gather   fut1 <- t_w            h.0.w        gathered again
    wait     w_   <- fut1           h.0.w
    compute  gx   <- gy, w_
    compute  gw   <- gy, x
    reduce   fut2 <- gw             h.0.w        all-reduce or reduce-scatter, by the plan
    free     w_
    wait     g    <- fut2           h.0.w
    return   g                                   forward has a return of its own

Values are names; ``Timeline.values`` has their sizes and dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder_zero.encodings.encoding import Encoding
from thunder_zero.plan.amounts import size
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.traffic import Traffic, bucket_traffic, gather_work, reduce_work
from thunder_zero.schedule.ops import (
    Compute,
    Defer,
    Exchange,
    Gather,
    Launch,
    Op,
    Reduce,
    Work,
    ends,
    starts_collective,
    tied,
)

NUMBER = "number"  # the dtype of a Python number
NO_TRAFFIC = Traffic()
MOST_NAMES = 8  # an error shows at most this many names of an operation


@dataclass(frozen=True, slots=True)
class Value:
    """The size and dtype of a value."""

    nbytes: int  # bytes of the value's elements; for a handle, of the result in flight
    dtype: str  # name of the dtype, ``"float32"``; NUMBER for a Python number
    base: str = ""  # the value whose memory this value views; "" if this value is not known to be a view

    def copied(self, names: Mapping[str, str]) -> Value:
        """Return the size, dtype and base of a copy. A copied view is a view of its base's copy in ``names``."""
        return replace(self, base=names[self.base]) if self.base in names else self


@dataclass(frozen=True)
class Timeline:
    """Operations in the order in which they run, forward first."""

    ops: tuple[Op, ...]  # the operations. Each phase ends with its return
    values: Mapping[str, Value]  # size and dtype of each value, inputs included
    plan: Plan  # the plan of each parameter
    # a mapping from values that exist before the first operation to paths. Shards and replicated parameters have a
    # path. Data have None
    inputs: Mapping[str, str | None] = field(default_factory=dict)
    tangents: frozenset[str] = frozenset()  # the gradients of outputs, which backward receives
    # (path, value) pairs of the gradients that backward returns for parameters
    gradients: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """Summarize the plan and, for each phase, the operations by kind and the bytes that this rank sends."""
        lines = [f"<Timeline: {len(self.ops)} operations, {self.plan!r}"]
        for phase in ("forward", "backward"):
            ops = [op for op in self.ops if op.backward is (phase == "backward")]
            kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(op.kind for op in ops).most_common())
            lines.append(f"  {phase}: {kinds or 'nothing'}; sends {size(sum(self.traffic(op).sent for op in ops))}")
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
            if isinstance(op, Compute):
                if not op.repeatable or not without_data.issuperset(op.reads) or not self.numbers.isdisjoint(op.writes):
                    continue
                is_derived = not writers.keys().isdisjoint(op.reads) or not self.cast.isdisjoint(op.reads)
            elif ends(op, Gather):
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
        waits = ((index, op) for index, op in enumerate(self.ops) if ends(op, Gather))
        return tuple(
            (index, name, param)
            for index, op in waits
            for name, param in zip(op.writes, self.params_of(op), strict=True)
        )

    @property
    def full_parameters(self) -> dict[str, str]:
        """A mapping from values that are full parameters, gathered or cast, to their paths."""
        casts = (op for op in self.ops if isinstance(op, Compute) and not self.cast.isdisjoint(op.reads))
        paths = {op.writes[0]: self.inputs[op.reads[0]] or "" for op in casts}
        return paths | {name: param.path for _, name, param in self.gathered}

    @cached_property
    def backward_start(self) -> int:
        """The index of backward's first operation; the number of operations if there is no backward."""
        return sum(not op.backward for op in self.ops)

    @cached_property
    def launches(self) -> dict[str, Launch]:
        """A mapping from handles to launches."""
        return {op.handle: op for op in self.ops if isinstance(op, Launch)}

    @cached_property
    def collectives(self) -> dict[str, Op]:
        """A mapping from handles to the operations that start collectives, torch's tensor parallelism included."""
        return {op.writes[0]: op for op in self.ops if starts_collective(op)}

    def feeds_reduction(self, op: Op) -> bool:
        """Return whether an operation is the wait for intra-replica means, which another reduction reads."""
        return ends(op, Reduce) and op.launch.over != self.plan.reduced_over(self.params_of(op)[0])[-1]

    def is_second_reduction(self, op: Op) -> bool:
        """Return whether an operation is a reduction that reads the means of another reduction."""
        return isinstance(op, Reduce) and op.over != self.plan.reduced_over(self.params_of(op)[0])[0]

    def recomputes(self, op: Op) -> bool:
        """Return whether an operation recomputes a value that forward did not save; False for a derived value."""
        return isinstance(op, Compute) and op.repeated and self.derived.keys().isdisjoint(op.writes)

    def repeats(self, op: Op) -> tuple[int, ...]:
        """Return the FLOPs of each operation of forward that an operation, or a fused region, computes again."""
        return (op.repeats or (op.flops,) * self.recomputes(op)) if isinstance(op, Compute) else ()

    def memory(self, name: str) -> str:
        """Return the value whose memory a value views, or the value itself."""
        value = self.values.get(name)
        return value.base or name if value else name

    def nbytes(self, name: str) -> int:
        """Return the bytes of a value's elements; 0 if it is not a tensor."""
        value = self.values.get(name)
        return value.nbytes if value else 0

    def with_ops(self, ops: Iterable[Op], values: Mapping[str, Value] | None = None) -> Timeline:
        """Return a timeline with the given operations, and with additional values. Waits follow their launches."""
        return replace(self, ops=tuple(tied(ops)), values={**self.values, **(values or {})})

    def params_of(self, op: Op) -> tuple[Param, ...]:
        """Return the parameters that an operation moves or frees."""
        return tuple(self.plan.by_name[path] for path in op.params)

    def traffic(self, op: Op) -> Traffic:
        """Return the bytes of an operation: on the wire if it is a launch, and of full parameters or gradients."""
        if isinstance(op, Compute):
            return op.work.traffic if isinstance(op.work, Exchange) else NO_TRAFFIC
        if isinstance(op, Launch):
            return bucket_traffic(self.plan, op.params, op.over if isinstance(op, Reduce) else None)
        of_gradients, params = isinstance(op, Defer) or ends(op, Reduce), self.params_of(op)
        return Traffic(full=sum(param.grad_bytes if of_gradients else param.full_bytes for param in params))

    def moved(self, op: Op) -> int:
        """Return the bytes that a computation reads and writes in memory, or a launch to encode and decode messages.

        Views and operations of other kinds have 0. Count each tensor once, and for an expanded tensor the memory that
        it views. For an indexed tensor, such as an embedding table, count at most the written bytes. Count only the
        inputs and outputs of a fused region.
        """
        if isinstance(op, Launch):
            return sum(map(sum, self.coded(op)))
        if not isinstance(op, Compute) or op.between_slices or op.work in (Work.NONE, Work.VIEW):
            return 0
        bytes_of, written_bytes = self.nbytes, sum(self.nbytes(name) for name in op.updates or op.writes)
        read = [name for name in dict.fromkeys(op.reads) if name not in op.updates]
        read_bytes = [min(bytes_of(name), bytes_of(self.memory(name)) or bytes_of(name)) for name in read]
        if op.work is Work.INDEX:
            read_bytes = [min(nbytes, written_bytes) for nbytes in read_bytes]
        return written_bytes + sum(read_bytes)

    def coded(self, op: Launch) -> list[tuple[int, int]]:
        """Return the bytes that a launch reads and writes to encode, and to decode, for each parameter."""
        plan, params, is_gather = self.plan, self.params_of(op), isinstance(op, Gather)
        return [gather_work(plan, param) if is_gather else reduce_work(plan, param, op.over) for param in params]

    def travels_as(self, op: Launch, param: Param) -> Encoding:
        """Return the encoding in which a launch sends a parameter, or its gradient."""
        plan = self.plan
        return plan.gather_encoding(param) if isinstance(op, Gather) else plan.reduce_encoding(param, op.over)


def overwritten(timeline: Timeline) -> frozenset[str]:
    """Return the values whose memory an operation overwrites, or may overwrite. No later operation may read them."""
    memory_of: dict[str, str] = {}  # value -> the first value that may have the same memory
    for op in timeline.ops:
        if isinstance(op, Compute) and op.work in (Work.VIEW, Work.AWAIT) and op.reads:
            memory_of.update(dict.fromkeys(op.writes, memory_of.get(op.reads[0], op.reads[0])))
    changed = {memory_of.get(name, name) for op in timeline.ops if isinstance(op, Compute) for name in op.updates}
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

"""Folds records of lines over a schedule: the bytes alive at each line, the life of each storage.

::

    operations of a timeline  ->  the lines of their traces  ->  the storages that each line allocates and frees

A storage is alive while a name, a collective in flight or the model's state holds it. No line runs here, so any
schedule of a program's lines takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Launch, Op, Reduce, Return, Wait, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Holds
from thunder_zero.tools.forecast.recorder import RecordedCollective, Recorder
from thunder_zero.tools.forecast.rehearsal import AtRest
from thunder_zero.tools.forecast.watch import FREED, Event, Layout, Placed


@dataclass(slots=True, eq=False)
class Allocation:
    """The life of a storage, from allocation to free."""

    nbytes: int
    kind: Holds  # final when the allocating line has run
    line: int  # the index of the allocating line; -1 before the first line
    born: int  # the number of allocations and frees before it was allocated
    holds: int = 0  # the names, collectives and states that hold it
    freed: int | None = None  # the number of allocations and frees before it was freed; None while it is alive
    freed_by: int | None = None  # the index of the freeing line
    name: str = ""  # as in :class:`thunder_zero.tools.forecast.figures.Storage`
    op: Op | None = None  # the collective that allocated it. Its parameters name a storage without a name

    def is_alive_after(self, events: int) -> bool:
        """Return whether the storage is alive after this number of allocations and frees."""
        return self.born < events and (self.freed is None or self.freed >= events)


class Held(NamedTuple):
    """A tensor that a name holds."""

    allocation: Allocation
    layout: Layout


class FoldedLine(NamedTuple):
    """A line that ran."""

    phase: str  # "forward", "loss", "backward" or "optimizer step"
    op: Op | None  # its operation, or None outside of the phases and at the beginning of backward
    highest: int  # the most bytes alive while the line ran
    alive: int  # the bytes alive after it


@dataclass
class Fold:
    """A step, whose lines are folded in order."""

    recorder: Recorder
    timeline: Timeline
    lines: list[FoldedLine] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)  # in the order of their allocation
    peak: int = 0  # the most bytes alive in forward, the loss and backward
    events_at_peak: int = 0  # the number of allocations and frees when the most bytes were alive

    def __post_init__(self) -> None:
        self._now = self._highest = self._events = 0
        self._phase = "forward"
        self._kind = Holds.TEMPORARY  # of new storages
        self._names: dict[str, Any] = {}  # what each name holds: ``Held``, or another value
        self._in_flight: dict[str, tuple[RecordedCollective, list[Allocation]]] = {}  # by handle
        self._uncounted = Allocation(0, Holds.TEMPORARY, -1, 0, holds=1)
        self._at_rest = list(map(self._rest, self.recorder.rehearsal.at_rest))
        self.peak, self.events_at_peak = self._now, self._events
        self._bind(self.recorder.rehearsal.inputs, self.recorder.rehearsal.inputs.values(), ())

    def run(self) -> Fold:
        """Fold a step, with the loss and the optimizer's step."""
        ops, start = self.timeline.ops, self.timeline.backward_start
        self._run_phase(ops[:start])
        if start == len(ops):
            return self
        self._run_loss()
        self._phase = "backward"
        read = {name for op in ops[start:] for name in op.reads}
        self._drop(name for name in self.timeline.tangents if name in self._names and name not in read)
        self._end_line(None)
        self._run_phase(ops[start:])
        gradients = {name for _, name in self.timeline.gradients}
        self._drop([name for name in self._names if name not in gradients])
        self._step()
        return self

    def _run_phase(self, ops: Sequence[Op]) -> None:
        freed: Op | None = None
        for op, following in zip(ops, (*ops[1:], ops[-1]), strict=True):
            match op:
                case Compute() | Defer():
                    self._run_line(op)
                case Gather() | Reduce():
                    freed = self._launch(op, following)
                case Wait():
                    self._wait(op)
                case Free() if op is not freed:
                    self._drop(op.reads)
                    self._end_line(op)

    def _run_line(self, op: Compute | Defer) -> None:
        values = [self._names[name] for name in op.reads]
        record = self.recorder.line(op, [value.layout if isinstance(value, Held) else value for value in values])
        frame = [value.allocation if isinstance(value, Held) else self._uncounted for value in values]
        frame += [self._at_rest[~self.recorder.rehearsal.before[path]] for path in self.recorder.deferred_for(op)]
        is_deferred = isinstance(op, Defer)
        self._kind = Holds.DEFERRED if is_deferred else Holds.TEMPORARY
        self._play(record.events, frame, op if is_deferred else None)
        for slot in record.kept:
            frame[slot].holds += 1
        self._bind(op.writes, record.outputs, frame)
        if isinstance(op, Defer):
            self._note_full_gradients(op)
        else:
            for name in op.writes:
                if isinstance(held := self._names[name], Held):
                    held.allocation.name = held.allocation.name or name
        self._end_line(op)

    def _launch(self, op: Launch, following: Op) -> Op | None:
        """Fold the lines of a launch. Return the FREE that runs between them, after what it frees is encoded."""
        values = [self._names[name] for name in op.reads]
        record = self.recorder.collective(op, [value.layout for value in values])
        frame = [value.allocation for value in values]
        for allocation in frame if isinstance(op, Reduce) else ():
            allocation.holds += 1
        frame += [self._at_rest[~self.recorder.rehearsal.before[path]] for path in self.recorder.deferred_for(op)]
        self._in_flight[op.handle] = record, frame
        freed = None
        for number, events in enumerate(record.launch):
            self._run_part(op, events, frame)
            if not number:
                self._note_full_gradients(op)
            self._end_line(op)
            if not number and len(record.launch) > 1 and isinstance(following, Free):
                freed = following
                self._drop(freed.reads)
                self._end_line(freed)
        return freed

    def _wait(self, op: Wait) -> None:
        record, frame = self._in_flight.pop(op.launch.handle)
        *before, writes, after = record.wait
        for events in before:
            self._run_part(op, events, frame)
            self._end_line(op)
        self._run_part(op, writes, frame)
        self._arrive(op, record, frame)
        self._run_part(op, after, frame)
        for slot in record.lasting:
            self._release(frame[slot])
        self._end_line(op)

    def _arrive(self, op: Wait, record: RecordedCollective, frame: list[Allocation]) -> None:
        """Bind what a wait writes, and label it."""
        for slot in record.kept:
            frame[slot].holds += 1
        self._bind(op.writes, record.outputs, frame)
        plan = self.timeline.plan
        if not self.timeline.feeds_reduction(op):
            kind = Holds.GATHERED if ends(op, Gather) else Holds.REDUCED_GRADIENT
            for name, path in zip(op.writes, op.params, strict=True):
                self._relabel(name, Holds.IN_FLIGHT, kind, path)
                if kind is Holds.REDUCED_GRADIENT and plan.rests_on_host(plan.by_name[path]):
                    self._free(self._names[name].allocation)
        self._end_line(op)

    def _run_part(self, op: Op, events: Iterable[Event], frame: list[Allocation]) -> None:
        self._kind = Holds.IN_FLIGHT
        self._play(events, frame, op)

    def _note_full_gradients(self, op: Launch | Defer) -> None:
        if isinstance(op, Reduce | Defer) and not self.timeline.is_second_reduction(op):
            for name, path in zip(op.reads, op.params, strict=True):
                self._relabel(name, Holds.TEMPORARY, Holds.FULL_GRADIENT, path)

    def _run_loss(self) -> None:
        """Fold the loss and its gradient. Only they hold outputs of forward, and backward what forward has saved."""
        returned = self.timeline.ops[self.timeline.backward_start - 1]
        assert isinstance(returned, Return), "a phase ends with its return"
        for name in returned.saves:
            self._relabel(name, Holds.TEMPORARY, Holds.SAVED)
        outputs = {name: self._names[name] for name in returned.returned}
        record = self.recorder.loss(
            {name: value.layout if isinstance(value, Held) else value for name, value in outputs.items()}
        )
        frame = [value.allocation if isinstance(value, Held) else self._uncounted for value in outputs.values()]
        for allocation in frame:
            allocation.holds += 1
        self._drop([name for name in self._names if name not in returned.saves])
        self._phase, self._kind, self._highest = "loss", Holds.LOSS, self._now
        for allocation in frame:
            if allocation.kind is Holds.TEMPORARY:
                allocation.kind = Holds.LOSS
        self._play(record.events, frame)
        self._bind(self.recorder.tangents, record.outputs, frame)
        self._end_line(None)

    def _step(self) -> None:
        """Fold the optimizer's step, before which the caller drops the inputs."""
        state = self.recorder.rehearsal
        for rest, allocation in zip(state.at_rest, self._at_rest, strict=True):
            if rest.kind is Holds.INPUT:
                self._release(allocation)
        if state.optimizer is None or not self.timeline.gradients or not state.synced:
            return
        self._phase, self._kind = OPTIMIZER_STEP, Holds.TEMPORARY
        peak, self._highest = (self.peak, self.events_at_peak), self._now
        self._play(self.recorder.optimizer_step(), [self._uncounted] * len(self.timeline.gradients))
        self.peak, self.events_at_peak = peak
        self._end_line(None)

    # Names and storages.

    def _bind(self, names: Iterable[str], values: Iterable[Any], frame: Sequence[Allocation]) -> None:
        """Let names hold what a line has written. Slots of ``frame`` and those at rest have storages."""
        for name, value in zip(names, values, strict=True):
            if isinstance(value, Placed):
                slot = value.slot
                allocation = self._uncounted if slot is None else frame[slot] if slot >= 0 else self._at_rest[~slot]
                allocation.holds += 1
                value = Held(allocation, value.layout)
            self._names[name] = value

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            value = self._names.pop(name, None)
            if isinstance(value, Held):
                self._release(value.allocation)

    def _release(self, allocation: Allocation) -> None:
        allocation.holds -= 1
        if allocation.holds <= 0:
            self._free(allocation)

    def _play(self, events: Iterable[Event], frame: list[Allocation], op: Op | None = None) -> None:
        """Allocate and free the slots of a frame. It grows by the new ones."""
        for slot, nbytes in events:
            if nbytes == FREED:
                self._release(frame[slot])
                continue
            allocation = Allocation(nbytes, self._kind, len(self.lines), self._events, op=op)
            frame += [self._uncounted] * (slot - len(frame))
            frame.append(allocation)
            self.allocations.append(allocation)
            self._count(nbytes)

    def _rest(self, rest: AtRest) -> Allocation:
        if rest.nbytes is None:
            return self._uncounted
        allocation = Allocation(rest.nbytes, rest.kind, -1, self._events, holds=1, name=rest.name)
        self.allocations.append(allocation)
        self._count(rest.nbytes)
        return allocation

    def _free(self, allocation: Allocation) -> None:
        if allocation.freed is None and allocation is not self._uncounted:
            allocation.freed, allocation.freed_by = self._events, len(self.lines)
            self._count(-allocation.nbytes)

    def _count(self, nbytes: int) -> None:
        self._events += 1
        self._now += nbytes
        self._highest = max(self._highest, self._now)
        if self._now > self.peak:
            self.peak, self.events_at_peak = self._now, self._events

    def _relabel(self, name: str, old: Holds, new: Holds, path: str = "") -> None:
        held = self._names[name]
        if isinstance(held, Held) and held.allocation.kind is old:
            held.allocation.kind = new
            held.allocation.name = path or held.allocation.name

    def _end_line(self, op: Op | None) -> None:
        self.lines.append(FoldedLine(self._phase, op, self._highest, self._now))
        self._highest = self._now

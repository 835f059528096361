"""Folds records of lines over a schedule: the bytes alive at each line, the life of each storage.

::

    operations of a timeline  ->  the lines of their traces  ->  the storages that each line allocates and frees

A storage is alive while a name, a collective in flight or the model's state holds it. No line runs here, so any
schedule of a program's lines takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Launch, Op, Reduce, Return, Wait, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.forecast.figures import EXCHANGE, Holds
from thunder_zero.tools.forecast.recorder import Record, Recorder
from thunder_zero.tools.forecast.watch import FREED, Event, Placed
from thunder_zero.tools.table.rows import AFTER_BACKWARD, OPTIMIZER_STEP, OUTER_STEP


@dataclass(slots=True, eq=False)
class Allocation:
    """The life of a storage, from allocation to free."""

    nbytes: int
    kind: Holds  # final when the allocating line has run
    line: int  # the index of the allocating line; -1 before the first line
    holds: int = 0  # the names, collectives and states that hold it
    freed_by: int | None = None  # the index of the freeing line; None while it is alive
    name: str = ""  # as in :class:`thunder_zero.tools.forecast.figures.Storage`
    op: Op | None = None  # the collective that allocated it. Its parameters name a storage without a name

    def relabel(self, old: Holds, new: Holds, path: str = "") -> None:
        if self.kind is old:
            self.kind, self.name = new, path or self.name


class FoldedLine(NamedTuple):
    """A line that ran."""

    phase: str  # "forward", "loss", "backward", "optimizer step" or "outer step"
    op: Op | None  # its operation, or None outside of the phases and at the beginning of backward
    highest: int  # the most bytes alive while the line ran
    alive: int  # the bytes alive after it
    written: Mapping[str, tuple[Allocation, Any]]  # the storages and the layouts of the values that it writes


class Fold:
    """A step, whose lines are folded in order."""

    def __init__(self, recorder: Recorder, timeline: Timeline) -> None:
        self.recorder, self.timeline = recorder, timeline
        self.lines: list[FoldedLine] = []
        self.allocations: list[Allocation] = []  # in the order of their allocation
        self.values: dict[str, Any] = {}  # layouts of tensors; other values as they are
        self.events: list[Allocation] = []  # what was allocated, or freed
        self.peak = self.until_peak = 0  # the most bytes alive before the optimizer's step; the events until then
        self._phase = "forward"
        self._alive = self._highest = 0  # the bytes alive now; the most bytes alive since the line began
        self._names: dict[str, Allocation] = {}  # what names hold
        self._in_flight: dict[str, tuple[Record, list[Allocation]]] = {}  # by handle
        self._uncounted, rehearsal = Allocation(0, Holds.TEMPORARY, -1, holds=1), recorder.rehearsal
        self._at_rest = [
            self._uncounted if rest is None else self._add(Allocation(rest.nbytes, rest.kind, -1, 1, name=rest.name))
            for rest in rehearsal.at_rest
        ]
        self._bind(rehearsal.inputs, rehearsal.inputs.values(), ())

    def run(self) -> Fold:
        """Fold a step, with the loss and the optimizer's step."""
        ops, start = self.timeline.ops, self.timeline.backward_start
        self._run_phase(ops[:start])
        if start == len(ops):
            return self
        self._run_loss()
        self._phase = "backward"
        read = {name for op in ops[start:] for name in op.reads}
        self._drop(self.timeline.tangents - read)
        self._end_line(None)
        self._run_phase(ops[start:])
        gradients = {name for _, name in self.timeline.gradients}
        self._drop([name for name in self._names if name not in gradients])
        self._step()
        self._exchange()
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
        record, frame = self.recorder.line(op, [self.values[name] for name in op.reads]), self._frame_of(op)
        kind, allocator = (Holds.DEFERRED, op) if isinstance(op, Defer) else (Holds.TEMPORARY, None)
        self._play(record.lines[0], frame, kind, allocator)
        for slot in record.kept:
            frame[slot].holds += 1
        self._bind(op.writes, record.outputs, frame)
        if isinstance(op, Defer):
            self._note_full_gradients(op)
        else:
            for name in op.writes:
                self._names[name].name = self._names[name].name or name
        self._end_line(op, op.writes)

    def _launch(self, op: Launch, following: Op) -> Op | None:
        """Fold the lines of a launch. Return the FREE that runs between them, after what it frees is encoded."""
        record, frame = self.recorder.collective(op, [self.values[name] for name in op.reads]), self._frame_of(op)
        for name in op.reads if isinstance(op, Reduce) else ():
            self._names[name].holds += 1
        self._in_flight[op.handle] = record, frame
        freed = None
        for number, events in enumerate(record.lines):
            self._play(events, frame, Holds.IN_FLIGHT, op)
            if not number:
                self._note_full_gradients(op)
            self._end_line(op)
            if not number and len(record.lines) > 1 and isinstance(following, Free):
                freed = following
                self._drop(freed.reads)
                self._end_line(freed)
        return freed

    def _frame_of(self, op: Compute | Defer | Launch) -> list[Allocation]:
        """Return the storages of what an operation reads, and of deferred gradients that it adds."""
        before = [self._at_rest[~self.recorder.rehearsal.before[path]] for path in self.recorder.deferred_for(op)]
        return [*(self._names[name] for name in op.reads), *before]

    def _wait(self, op: Wait) -> None:
        record, frame = self._in_flight.pop(op.launch.handle)
        *before, writes, after = record.wait
        for events in before:
            self._play(events, frame, Holds.IN_FLIGHT, op)
            self._end_line(op)
        self._play(writes, frame, Holds.IN_FLIGHT, op)
        for slot in record.kept:
            frame[slot].holds += 1
        self._bind(op.writes, record.outputs, frame)
        if not self.timeline.feeds_reduction(op):
            plan, kind = self.timeline.plan, Holds.GATHERED if ends(op, Gather) else Holds.REDUCED_GRADIENT
            for name, path in zip(op.writes, op.params, strict=True):
                self._names[name].relabel(Holds.IN_FLIGHT, kind, path)
                if kind is Holds.REDUCED_GRADIENT and plan.rests_on_host(plan.by_name[path]):
                    self._free(self._names[name])
        self._end_line(op, op.writes)
        self._play(after, frame, Holds.IN_FLIGHT, op)
        for slot in record.lasting:
            self._release(frame[slot])
        self._end_line(op)

    def _note_full_gradients(self, op: Launch | Defer) -> None:
        if isinstance(op, Reduce | Defer) and not self.timeline.is_second_reduction(op):
            for name, path in zip(op.reads, op.params, strict=True):
                self._names[name].relabel(Holds.TEMPORARY, Holds.FULL_GRADIENT, path)

    def _run_loss(self) -> None:
        """Fold the loss and its gradient. Only they hold outputs of forward, and backward what forward has saved."""
        returned = self.timeline.ops[self.timeline.backward_start - 1]
        assert isinstance(returned, Return), "a phase ends with its return"
        for name in returned.saves:
            self._names[name].relabel(Holds.TEMPORARY, Holds.SAVED)
        outputs = tuple(dict.fromkeys(returned.returned))
        record = self.recorder.loss({name: self.values[name] for name in outputs})
        frame = [self._names[name] for name in outputs]
        for allocation in frame:
            allocation.holds += 1
            allocation.relabel(Holds.TEMPORARY, Holds.LOSS)
        self._drop([name for name in self._names if name not in returned.saves])
        self._phase, self._highest = "loss", self._alive
        self._play(record.lines[0], frame, Holds.LOSS)
        self._bind(self.recorder.tangents, record.outputs, frame)
        self._end_line(None, self.recorder.tangents)

    def _step(self) -> None:
        state = self.recorder.rehearsal
        for allocation in self._at_rest:
            if allocation.kind is Holds.INPUT:
                self._release(allocation)
        if state.optimizer is None or not self.timeline.gradients or not state.synced:
            return
        self._phase, self._highest = OPTIMIZER_STEP, self._alive
        self._play(self.recorder.optimizer_step(), [self._uncounted] * len(self.timeline.gradients), Holds.TEMPORARY)
        self._end_line(None)

    def _exchange(self) -> None:
        """Fold the outer step: a line for each fragment that sites exchange, of which a step has at most one."""
        self._phase, self._highest = OUTER_STEP, self._alive
        for nbytes in self.recorder.rehearsal.exchanges:
            self._free(self._add(Allocation(nbytes, Holds.IN_FLIGHT, len(self.lines), name=EXCHANGE)))
            self._end_line(None)

    def _bind(self, names: Iterable[str], values: Iterable[Placed], frame: Sequence[Allocation]) -> None:
        """Let names hold what a line has written. Slots of ``frame`` and those at rest have storages."""
        for name, (slot, value) in zip(names, values, strict=True):
            allocation = self._uncounted if slot is None else frame[slot] if slot >= 0 else self._at_rest[~slot]
            allocation.holds += 1
            self._names[name], self.values[name] = allocation, value

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._names:
                self._release(self._names.pop(name))

    def _play(self, events: Iterable[Event], frame: list[Allocation], kind: Holds, op: Op | None = None) -> None:
        """Allocate and free the slots of a frame. It grows by the new ones."""
        for slot, nbytes in events:
            if nbytes == FREED:
                self._release(frame[slot])
                continue
            frame += [self._uncounted] * (slot - len(frame))
            frame.append(self._add(Allocation(nbytes, kind, len(self.lines), op=op)))

    def _add(self, allocation: Allocation) -> Allocation:
        self.allocations.append(allocation)
        self._count(allocation, allocation.nbytes)
        return allocation

    def _release(self, allocation: Allocation) -> None:
        allocation.holds -= 1
        if allocation.holds <= 0:
            self._free(allocation)

    def _free(self, allocation: Allocation) -> None:
        if allocation.freed_by is None and allocation is not self._uncounted:
            allocation.freed_by = len(self.lines)
            self._count(allocation, -allocation.nbytes)

    def _count(self, allocation: Allocation, nbytes: int) -> None:
        self.events.append(allocation)
        self._alive += nbytes
        self._highest = max(self._highest, self._alive)
        if self._alive > self.peak and self._phase not in AFTER_BACKWARD:
            self.peak, self.until_peak = self._alive, len(self.events)

    def _end_line(self, op: Op | None, writes: Sequence[str] = ()) -> None:
        written = {name: (self._names[name], self.values[name]) for name in writes}
        self.lines.append(FoldedLine(self._phase, op, self._highest, self._alive, written))
        self._highest = self._alive

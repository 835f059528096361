"""Extends the time and memory of a step with a few traced blocks to the whole model.

Operations with equal keys do equal work. A period is a range of keys that occurs twice in a row in a phase. The whole
model has more blocks, so its phase repeats the period more often::

    traced keys     a b | c d e | c d e | c d f g
    marks                 ^       ^                     positions where blocks begin to compute
    longer phase    a b | c d e | c d e | c d e | c d f g

Each additional block also adds its bytes at rest to every figure of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from thunder_zero.schedule.ops import (
    Compute,
    Free,
    Gather,
    Launch,
    Op,
    Wait,
    ends,
    ends_collective,
    starts_collective,
)
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Cost, Device
from thunder_zero.tools.forecast.figures import AT_REST, Holds, Memory
from thunder_zero.tools.time.estimate import Estimate, model_seconds, step_time
from thunder_zero.traces.compiled import Traces


@dataclass(frozen=True, slots=True)
class Period:
    """A range of ``length`` positions from ``start`` whose keys equal the keys of the next ``length`` positions."""

    start: int
    length: int

    @property
    def end(self) -> int:
        """The position where additional periods are inserted."""
        return self.start + self.length


def find_period(keys: Sequence[Hashable], marks: Sequence[int]) -> Period | None:
    """Return the first period that occurs at least twice in a row, or None if no period does.

    ``marks`` are the ascending positions where identical blocks begin. The length of a period is the distance between
    two successive marks.
    """
    periods = (_period_around(keys, first, second - first) for first, second in pairwise(marks))
    return next((period for period in periods if period is not None), None)


def _period_around(keys: Sequence[Hashable], position: int, length: int) -> Period | None:
    """Return the first period of ``length`` in the run of repeating keys around a position, or None."""
    if length <= 0 or keys[position] != keys[position + length]:
        return None
    start = stop = position
    while start and keys[start - 1] == keys[start - 1 + length]:
        start -= 1
    while stop + length < len(keys) and keys[stop] == keys[stop + length]:
        stop += 1
    return Period(start, length) if stop - start >= length else None


def positions(length: int, period: Period | None, copies: int) -> list[int]:
    """Return, for each position of the longer sequence, its source in the sequence of ``length`` items."""
    if period is None or not copies:
        return list(range(length))
    middle = list(range(period.start, period.end)) * copies
    return [*range(period.end), *middle, *range(period.end, length)]


def moved_link(position: int, source: int, link: int, period: Period | None, copies: int) -> int:
    """Return the position in the longer sequence to which an operation refers, as a wait refers to its launch.

    The operation at ``position`` copies the traced operation at ``source``, which refers to ``link``.
    """
    if period is not None and copies and source >= period.end and link < period.start:
        return link
    return position - (source - link)


class NotPeriodic(Exception):
    """Raised if the traced blocks do unequal work, so that more blocks must be traced."""


def lengthen(keys: Sequence[Hashable], marks: Sequence[int], copies: int) -> tuple[list[int], Period | None]:
    """Return the :func:`positions` of a sequence with ``copies`` more periods, and the period."""
    period = find_period(keys, marks) if copies else None
    if copies and period is None:
        raise NotPeriodic
    return positions(len(keys), period, copies), period


def _marks_of(timeline: Timeline, units: Sequence[str]) -> tuple[list[int], list[int]]:
    """Return the positions in forward and in backward where computation with each unit's parameters begins."""
    unit_of = {path: unit for path in timeline.plan.by_name for unit in units if path.startswith(f"{unit}.")}
    owner = {name: unit_of[path] for name, path in timeline.inputs.items() if path in unit_of}
    for op in timeline.ops:
        if ends(op, Gather):
            pairs = zip(op.writes, op.params, strict=True)
            owner.update((name, unit_of[path]) for name, path in pairs if path in unit_of)
    first_read: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for position, op in enumerate(timeline.ops):
        if not isinstance(op, Compute):
            continue
        units_read = {owner[name] for name in op.reads if name in owner}
        if len(units_read) == 1 and all(name in owner for name in op.reads):  # a view or a cast of parameters alone
            owner.update(dict.fromkeys(op.writes, *units_read))
            continue
        for unit in units_read:
            first_read[op.backward].setdefault(unit, position)
    return sorted(first_read[False].values()), sorted(first_read[True].values())


def _phases(timeline: Timeline, units: Sequence[str]) -> Iterator[tuple[range, list[int]]]:
    """Yield (positions of a phase, marks in the phase) pairs. A mark is where an identical block begins to compute."""
    forward, backward = _marks_of(timeline, units)
    yield range(timeline.backward_start), forward
    marks = [position - timeline.backward_start for position in backward]
    yield range(timeline.backward_start, len(timeline.ops)), marks


def estimate_whole(traces: Traces, device: Device, units: Sequence[str], copies: int) -> Estimate:
    """Return the estimate of a step with ``copies`` blocks in addition to the traced ``units``."""
    timeline, lifted = traces.timeline, traces.lifted
    traced = step_time(timeline, device, model=lifted)
    if not copies:
        return traced
    ops, costs = _lengthen_ops(timeline, traced.costs, units, copies)
    model = _total(lifted, model_seconds(lifted, device), units, copies)
    return replace(traced, timeline=replace(timeline, ops=ops), costs=costs, model_seconds=model)


def _lengthen_ops(
    timeline: Timeline, costs: Sequence[Cost], units: Sequence[str], copies: int
) -> tuple[tuple[Op, ...], tuple[Cost, ...]]:
    """Return the operations of a step with more blocks, and their costs, as input for a simulation."""
    ops = timeline.ops
    launched = {op.writes[0]: position for position, op in enumerate(ops) if starts_collective(op)}
    links = [launched[op.reads[0]] if ends_collective(op) else position for position, op in enumerate(ops)]
    longer_ops: list[Op] = []
    longer_costs: list[Cost] = []
    phase_start = 0
    for phase, marks in _phases(timeline, units):
        for position in phase:  # backward may wait again for an ended collective of forward
            links[position] = links[position] if links[position] in phase else position
        keys = [(timeline.ops[position].kind, costs[position], position - links[position]) for position in phase]
        order, period = lengthen(keys, marks, copies)
        if period is not None:
            _require_balance([timeline.ops[position] for position in phase[period.start : period.end]])
        for position, source in enumerate(order):
            op, link = timeline.ops[phase[source]], links[phase[source]] - phase.start
            if isinstance(op, Free):
                continue
            if starts_collective(op) or ends_collective(op):
                op = _with_handle(op, f"handle {phase_start + moved_link(position, source, link, period, copies)}")
            longer_ops.append(op)
            longer_costs.append(costs[phase[source]])
        phase_start += len(order)
    return tuple(longer_ops), tuple(longer_costs)


def _with_handle(op: Op, handle: str) -> Op:
    """Return a collective, or the wait for one, with another handle."""
    match op:
        case Wait(launch=launch):
            return replace(op, launch=replace(launch, handle=handle))
        case Compute():
            return replace(op, writes=(handle,)) if starts_collective(op) else replace(op, reads=(handle,))
    assert isinstance(op, Launch), "nothing else has a handle"
    return replace(op, handle=handle)


def _total(timeline: Timeline, seconds: Sequence[float], units: Sequence[str], copies: int) -> float:
    """Return the sum of the operations' seconds in a step with more blocks."""
    total = 0.0
    for phase, marks in _phases(timeline, units):
        keys = [(timeline.ops[position].kind, seconds[position]) for position in phase]
        order, _ = lengthen(keys, marks, copies)
        total += sum(seconds[phase[source]] for source in order)
    return total


def _require_balance(period: Sequence[Op]) -> None:
    """Raise NotPeriodic if a period has more or fewer waits than launches."""
    started = sum(isinstance(op, Launch) for op in period)
    if started != sum(isinstance(op, Wait) for op in period):
        raise NotPeriodic


STEPPED = (*AT_REST, Holds.REDUCED_GRADIENT)  # kinds of a block's bytes in the optimizer's step


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one rank in a step, in bytes of tensors' storages."""

    at_rest: int  # bytes between two steps, except gradients
    peak: int  # the most bytes in forward, the loss and backward
    optimizer_step: int  # the most bytes in the optimizer's step
    phase: str  # the phase of the peak
    by_kind: Mapping[str, int]  # bytes alive after the peak's line, keyed by kind, largest first
    storages: int  # the most storages alive at once


@dataclass(frozen=True, slots=True)
class _Change:
    """The change of the live bytes over one line."""

    rise: int  # the most live bytes during the line, minus the live bytes before the line
    total: int  # the live bytes after the line, minus the live bytes before the line
    kinds: tuple[tuple[Holds, int], ...]  # ``total``, split by kind
    count: int  # the number of storages that the line allocates, minus the number that it frees


def memory_whole(memory: Memory, traces: Traces, units: Sequence[str], copies: int) -> StepMemory:
    """Return the memory of a step with ``copies`` blocks in addition to the traced ``units``.

    ``memory`` is the forecast of the traced step, including the optimizer.
    """
    changes = _changes(memory)
    order = _order(memory, traces, units, changes, copies)
    block_storages = [storage for storage in memory.storages if copies and storage.name.startswith(f"{units[0]}.")]
    resting = [storage for storage in block_storages if storage.line < 0]
    alive = _before(memory)
    alive.update(
        {kind: copies * sum(storage.nbytes for storage in resting if storage.kind is kind) for kind in AT_REST}
    )
    count = sum(storage.line < 0 for storage in memory.storages) + copies * len(resting)
    total = sum(alive.values())
    most_storages = count
    peak = peak_line = 0
    for index, line in enumerate(order):
        change = changes[line]
        if total + change.rise > peak:
            peak, peak_line = total + change.rise, index
        total += change.total
        count += change.count
        most_storages = max(most_storages, count)
    for line, repeats in Counter(order[: peak_line + 1]).items():
        alive.update({kind: repeats * nbytes for kind, nbytes in changes[line].kinds})
    stepped_bytes = sum(storage.nbytes for storage in block_storages if storage.kind in STEPPED)
    return StepMemory(
        at_rest=memory.at_rest + copies * sum(storage.nbytes for storage in resting if storage.kind in AT_REST),
        peak=peak,
        optimizer_step=(memory.optimizer_step or 0) + copies * stepped_bytes,
        phase=memory.lines[order[peak_line]].phase,
        by_kind={str(kind): nbytes for kind, nbytes in alive.most_common() if nbytes},
        storages=most_storages,
    )


def _before(memory: Memory) -> Counter[Holds]:
    alive = Counter[Holds]()
    for storage in memory.storages:
        if storage.line < 0:
            alive[storage.kind] += storage.nbytes
    return alive


def _order(memory: Memory, traces: Traces, units: Sequence[str], changes: Sequence[_Change], copies: int) -> list[int]:
    """Return the lines of the longer step, as indices of lines of the traced step."""
    forward, backward = _marks_of(traces.timeline, units)
    longer: list[int] = []
    for phase, marks in (("forward", forward), ("loss", []), ("backward", backward)):
        lines = [index for index, line in enumerate(memory.lines) if line.phase == phase]
        by_position = {memory.lines[line].position: number for number, line in enumerate(lines)}
        in_phase = [by_position[traces.lines[mark][0]] for mark in marks]
        order, _ = lengthen([changes[line] for line in lines], in_phase, copies if marks else 0)
        longer += [lines[number] for number in order]
    return longer


def _changes(memory: Memory) -> list[_Change]:
    born, freed = Counter[int](), Counter[int]()
    for storage in memory.storages:
        if storage.line >= 0:
            born[storage.line] += 1
        if storage.freed is not None:
            freed[storage.freed] += 1
    alive: dict[Holds, int] = _before(memory)
    total = sum(alive.values())
    changes = []
    for index, line in enumerate(memory.lines):
        alive_after = dict(line.alive.items_in_order)
        kinds = ((kind, alive_after.get(kind, 0) - alive.get(kind, 0)) for kind in Holds)
        highest, total_after = line.highest - memory.reserve, line.total - memory.reserve
        changed = tuple((kind, nbytes) for kind, nbytes in kinds if nbytes)
        changes.append(_Change(highest - total, total_after - total, changed, born[index] - freed[index]))
        alive, total = alive_after, total_after
    return changes

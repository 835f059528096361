"""Extends the time and memory of a step with a few traced blocks to the whole model.

Lines with equal keys do equal work. A period is a range of keys that occurs twice in a row in a phase. The whole model
has more blocks, so its phase repeats the period more often::

    traced keys     a b | c d e | c d e | c d f g
    marks                 ^       ^                     positions where blocks begin to compute
    longer phase    a b | c d e | c d e | c d e | c d f g

Each additional block also adds its bytes at rest to every figure of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from thunder_zero.schedule.ops import Compute, Exchange, Op, Work, ends_collective, starts_collective
from thunder_zero.schedule.timeline import NO_TRAFFIC, Timeline
from thunder_zero.tools.devices.device import Cost, Device
from thunder_zero.tools.forecast.figures import AT_REST, Holds
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.table.rows import DIGESTS, LOSS, OPTIMIZER_STEP, look_up, parameters_in
from thunder_zero.tools.time.estimate import Estimate, model_seconds, seconds_around, step_time


def find_period(keys: Sequence[Hashable], marks: Sequence[int]) -> range | None:
    """Return the first positions whose keys equal the keys of the positions that follow, or None.

    ``marks`` are the ascending positions where identical blocks begin. The length of a period is the distance between
    two successive marks.
    """
    for mark, following in pairwise(marks):
        length, start, stop = following - mark, mark, mark  # of the run of repeating keys around the mark
        if not length or keys[mark] != keys[following]:
            continue
        while start and keys[start - 1] == keys[start - 1 + length]:
            start -= 1
        while stop + length < len(keys) and keys[stop] == keys[stop + length]:
            stop += 1
        if stop - start >= length:
            return range(start, start + length)
    return None


class NotPeriodic(Exception):
    """Raised if the traced blocks do unequal work, so that more blocks must be traced."""


def lengthen(keys: Sequence[Hashable], marks: Sequence[int], copies: int) -> list[int]:
    """Return the positions of a sequence in the order of a longer sequence, which has ``copies`` more periods."""
    whole = range(len(keys))
    period = find_period(keys, marks) if copies else range(0)
    if period is None:
        raise NotPeriodic
    return [*whole[: period.stop], *[*period] * copies, *whole[period.stop :]]


def _marks_of(timeline: Timeline, units: Sequence[str]) -> set[int]:
    """Return the ids of the operations with which computation with each unit's parameters begins in a phase."""
    unit_of = {path: unit for path in timeline.plan.by_name for unit in units if path.startswith(f"{unit}.")}
    params, first = parameters_in(timeline), dict[tuple[bool, str], int]()
    for op in timeline.ops:
        if isinstance(op, Compute) and timeline.derived.keys().isdisjoint(op.writes):
            for path in look_up(op.reads, params):
                if path in unit_of:
                    first.setdefault((op.backward, unit_of[path]), id(op))
    return set(first.values())


class Line(NamedTuple):
    """What a line of a step does, equal for equal work."""

    op: str  # the kind of its operation; "" for a further line of one
    cost: Cost  # nothing for a further line of an operation
    seconds: float  # the time of the model's FLOPs at the device's peak
    link: int  # the distance to the launch that a wait ends
    rise: int  # the most live bytes during the line, minus the live bytes before the line
    kinds: tuple[tuple[Holds, int], ...]  # the live bytes after the line, minus those before it, by kind
    storages: int  # the number of storages that the line allocates, minus the number that it frees


def _lines(fold: Fold, costs: Mapping[int, tuple[Cost, float]]) -> list[Line]:
    """Return what the lines do. ``costs`` are keyed by the ids of operations."""
    kinds: list[Counter[Holds]] = [Counter() for _ in range(len(fold.lines) + 1)]
    counts = Counter[int]()
    for storage in fold.allocations:
        freed = len(fold.lines) if storage.freed_by is None else storage.freed_by
        for number, sign in ((storage.line, 1), (freed, -1)):
            if number >= 0:
                kinds[number][storage.kind] += sign * storage.nbytes
                counts[number] += sign
    launched: dict[str, int] = {}
    seen, before, lines = set[int](), sum(s.nbytes for s in fold.allocations if s.line < 0), []
    for index, line in enumerate(fold.lines):
        op = line.op if id(line.op) not in seen else None
        seen.add(id(line.op))
        link, (cost, seconds) = 0, costs.get(id(op), (Cost(), 0.0))
        if op is not None and starts_collective(op):
            launched[op.writes[0]] = index
        elif op is not None and ends_collective(op) and fold.lines[launched[op.reads[0]]].phase == line.phase:
            link = index - launched[op.reads[0]]  # backward may wait again for an ended collective of forward
        changed = tuple((kind, nbytes) for kind, nbytes in kinds[index].items() if nbytes)
        kind = "" if op is None else op.kind
        change = line.highest - before, changed, counts[index]
        lines.append(Line(kind, cost, seconds, link, *change))
        before = line.alive
    return lines


def _order(fold: Fold, lines: Sequence[Line], units: Sequence[str], copies: int) -> list[int]:
    """Return the traced lines, as indices, in the order of the longer step up to the optimizer's step."""
    marks, order, start = _marks_of(fold.timeline, units), list[int](), 0
    for phase, group in groupby(fold.lines, key=lambda line: line.phase):
        in_phase = [line.op for line in group]
        keys = lines[start : start + len(in_phase)]
        begins = [position for position, op in enumerate(in_phase) if id(op) in marks and keys[position].op]
        positions = lengthen(keys, begins, copies if phase in ("forward", "backward") else 0)
        added = Counter(keys[position].op for position in positions)
        added.subtract(line.op for line in keys)
        if added["gather"] + added["reduce"] != added["wait"]:
            raise NotPeriodic
        order += [start + position for position in positions if phase != OPTIMIZER_STEP]
        start += len(in_phase)
    return order


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The time of a step of the whole model, and the memory of one rank, in bytes of tensors' storages."""

    estimate: Estimate
    at_rest: int  # bytes between two steps, except gradients
    peak: int  # the most bytes in forward, the loss and backward
    optimizer_step: int  # the most bytes in the optimizer's step
    phase: str  # the phase of the peak
    by_kind: Mapping[str, int]  # bytes alive after the peak's line, keyed by kind, largest first
    storages: int  # the most storages alive at once
    loss_seconds: float  # of the loss and its gradient
    optimizer_seconds: float  # of the optimizer's step, and of ZeRO-1's digests


STEPPED = (*AT_REST, Holds.REDUCED_GRADIENT)  # kinds of a block's bytes in the optimizer's step


def whole_step(fold: Fold, device: Device, units: Sequence[str], copies: int) -> WholeStep:
    """Return the step with ``copies`` blocks in addition to the traced ``units``."""
    timeline = fold.timeline
    traced = step_time(timeline, device)
    costs = zip(timeline.ops, traced.costs, model_seconds(timeline, device), strict=True)
    lines = _lines(fold, {id(op): (cost, seconds) for op, cost, seconds in costs})
    order = _order(fold, lines, units, copies)
    resting, alive = [storage for storage in fold.allocations if storage.line < 0], Counter[Holds]()
    for storage in resting:
        is_repeated = storage.kind in AT_REST and _is_in(units, storage.name)
        alive[storage.kind] += storage.nbytes * (1 + copies * is_repeated)
    count = sum(1 + copies * _is_in(units, storage.name) for storage in resting)
    # states, trained parameters and their rows grow alike
    stepped_times = alive[Holds.OPTIMIZER] / sum(item.nbytes for item in resting if item.kind is Holds.OPTIMIZER)
    around = seconds_around(fold.recorder, device)
    at_rest, level, peak, place = sum(alive[kind] for kind in AT_REST), sum(alive.values()), 0, 0
    growth = [sum(nbytes for _, nbytes in line.kinds) for line in lines]
    for position, index in enumerate(order):
        if level + lines[index].rise > peak:
            peak, place = level + lines[index].rise, position
        level += growth[index]
    for index, times in Counter(order[: place + 1]).items():
        alive.update({kind: times * nbytes for kind, nbytes in lines[index].kinds})
    stepped = sum(item.nbytes for item in fold.allocations if _is_in(units, item.name) and item.kind in STEPPED)
    steps = [line for line in fold.lines if line.phase == OPTIMIZER_STEP]
    return WholeStep(
        _with_costs(traced, fold, lines, order),
        at_rest,
        peak,
        optimizer_step=steps[-1].highest + copies * stepped if steps else 0,
        phase=fold.lines[order[place]].phase,
        by_kind={str(kind): nbytes for kind, nbytes in alive.most_common() if nbytes},
        storages=max(accumulate((lines[index].storages for index in order), initial=count)),
        loss_seconds=around[LOSS],
        optimizer_seconds=(around[OPTIMIZER_STEP] + around[DIGESTS]) * stepped_times,
    )


def _is_in(units: Sequence[str], name: str) -> bool:
    """Return whether a parameter, or a storage of one, belongs to the first unit."""
    return bool(units) and name.startswith(f"{units[0]}.")


def _with_costs(traced: Estimate, fold: Fold, lines: Sequence[Line], order: Sequence[int]) -> Estimate:
    """Return the estimate of a longer step. Lines between those of collectives are one operation."""
    ops: list[Op] = []
    costs: list[Cost] = []
    ops_of_lines = ((index, line.op) for index, line in enumerate(fold.lines) if line.op is not None)
    starts = {
        index: starts_collective(op) for index, op in ops_of_lines if starts_collective(op) or ends_collective(op)
    }
    last: dict[int, int] = {}  # the position in the longer step of the latest run of each line
    for is_collective, group in groupby(enumerate(order), key=lambda pair: pair[1] in starts):
        if not is_collective:
            ops.append(Compute((), ()))
            costs.append(_sum([lines[index].cost for _, index in group]))
            continue
        for position, index in group:
            line, is_repeated = lines[index], index in last
            last[index] = position
            # the launch may be in an earlier block, or in the run before
            launch = position - line.link if is_repeated else last[index - line.link]
            begin = Compute((), (f"handle {launch}",), work=Exchange("", NO_TRAFFIC))
            ops.append(begin if starts[index] else Compute(begin.writes, (), work=Work.AWAIT))
            costs.append(line.cost)
    seconds = sum(lines[index].seconds for index in order)
    timeline = replace(traced.timeline, ops=tuple(ops))
    return replace(traced, timeline=timeline, costs=tuple(costs), model_seconds=seconds)


def _sum(costs: Sequence[Cost]) -> Cost:
    flops, traffic = sum(cost.flops for cost in costs), sum(cost.traffic_bytes for cost in costs)
    return Cost(flops=flops, traffic_bytes=traffic, seconds=sum(cost.seconds for cost in costs))

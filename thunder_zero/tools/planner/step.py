"""The time of a step of the whole model, from the timeline of a model with fewer blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from thunder_zero.compiled import Traces
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline
from thunder_zero.tools.cost.costs import Cost
from thunder_zero.tools.cost.step_time import Estimate, counts_fused, model_seconds, step_time
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.planner.repeat import Stretch, linked, positions, stretch_of


class NotPeriodic(Exception):
    """The blocks in the middle do not do the same: trace more of them."""


@dataclass(frozen=True)
class Marks:
    """Positions of a timeline where each alike block begins to compute, ascending, by half."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def marks_of(timeline: Timeline, units: Sequence[str]) -> Marks:
    """Where operations of each half first read parameters of each unit together with data."""
    unit_of = {path: unit for path in timeline.plan.by_name for unit in units if path.startswith(f"{unit}.")}
    owner = {name: unit_of[path] for name, path in timeline.inputs.items() if path in unit_of}
    for op in timeline.ops:
        if timeline.ends(op, Kind.GATHER):
            pairs = zip(op.writes, op.params, strict=True)
            owner.update((name, unit_of[path]) for name, path in pairs if path in unit_of)
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for at, op in enumerate(timeline.ops[:-1]):
        if op.kind is not Kind.COMPUTE:
            continue
        read = {owner[name] for name in op.reads if name in owner}
        if len(read) == 1 and all(name in owner for name in op.reads):  # a view or a cast of parameters alone
            owner.update(dict.fromkeys(op.writes, *read))
            continue
        for unit in read:
            found[op.backward].setdefault(unit, at)
    return Marks(*(tuple(sorted(found[half].values())) for half in (False, True)))


def estimate_whole(traces: Traces, device: Device, units: Sequence[str], copies: int) -> Estimate:
    """The estimate of a step with ``copies`` more of the blocks than were traced.

    Args:
        traces: of a model with fewer blocks.
        device: what it runs on.
        units: paths of the blocks that are alike and were traced.
        copies: how many more there are.

    Raises:
        NotPeriodic: the traced blocks do not repeat.
    """
    timeline, lifted = traces.timeline, traces.lifted or traces.timeline
    traced = step_time(timeline, device, fused=counts_fused(traces, device), model=lifted)
    if not copies:
        return traced
    ops, costs = _longer(timeline, traced.costs, units, copies)
    model = _total(lifted, model_seconds(lifted, device), units, copies)
    return replace(traced, timeline=replace(timeline, ops=ops), costs=costs, model_seconds=model)


def _longer(
    timeline: Timeline, costs: Sequence[Cost], units: Sequence[str], copies: int
) -> tuple[tuple[Op, ...], tuple[Cost, ...]]:
    """The operations of a step with more blocks, as far as a simulation reads them, and their costs."""
    marks = marks_of(timeline, units)
    launched = {op.writes[0]: at for at, op in enumerate(timeline.ops) if op.kind in LAUNCHES}
    links = [launched[op.reads[0]] if op.kind is Kind.WAIT else at for at, op in enumerate(timeline.ops)]
    border = timeline.border
    ops: list[Op] = []
    found: list[Cost] = []
    base = 0
    for start, stop, at_marks in ((0, border, marks.forward), (border, len(timeline.ops), marks.backward)):
        signs = [(op.kind, costs[at], at - links[at]) for at, op in enumerate(timeline.ops[start:stop], start)]
        stretch = stretch_required(signs, [at - start for at in at_marks], copies)
        if stretch is not None:
            _require_balance(timeline.ops[start + stretch.start : start + stretch.end])
        longer = positions(stop - start, stretch, copies)
        for at, source in enumerate(longer):
            op, link = timeline.ops[start + source], links[start + source] - start
            if op.kind is Kind.FREE:
                continue
            if op.kind in LAUNCHES or op.kind is Kind.WAIT:
                handle = (f"handle {base + linked(at, source, link, stretch, copies)}",)
                op = replace(op, reads=handle * (op.kind is Kind.WAIT), writes=handle * (op.kind in LAUNCHES))
            ops.append(op)
            found.append(costs[start + source])
        base += len(longer)
    return tuple(ops), tuple(found)


def _total(timeline: Timeline, seconds: Sequence[float], units: Sequence[str], copies: int) -> float:
    """The sum of what each operation takes, in a step with more blocks."""
    marks, border = marks_of(timeline, units), timeline.border
    total = sum(seconds)
    for start, stop, at_marks in ((0, border, marks.forward), (border, len(timeline.ops), marks.backward)):
        signs = [(op.kind, seconds[at]) for at, op in enumerate(timeline.ops[start:stop], start)]
        stretch = stretch_required(signs, [at - start for at in at_marks], copies)
        if stretch is not None:
            total += copies * sum(seconds[start + stretch.start : start + stretch.end])
    return total


def _require_balance(period: Sequence[Op]) -> None:
    """That a period waits for as many launches as it starts: otherwise they pile up, to be waited for after the last.

    Raises:
        NotPeriodic: it does not.
    """
    started = sum(op.kind in LAUNCHES for op in period)
    if started != sum(op.kind is Kind.WAIT for op in period):
        raise NotPeriodic


def stretch_required(signs: Sequence[Hashable], marks: Sequence[int], copies: int) -> Stretch | None:
    """The stretch that repeats; None if nothing has to be repeated.

    Raises:
        NotPeriodic: there is none.
    """
    stretch = stretch_of(signs, marks) if copies else None
    if copies and stretch is None:
        raise NotPeriodic
    return stretch

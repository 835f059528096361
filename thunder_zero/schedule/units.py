"""Cuts forward into segments of one unit each, for ``Policy.recompute="units"``.

An operation belongs to the unit whose parameters it reads. The cut between two units is where the fewest bytes are
alive, between the last operation of the first unit and the first operation of the second unit::

    compute h  <- x0, a.w          a
    compute x1 <- x0, h            a             x1 is alive at the cut: it is saved
    compute m  <- x1               b
    compute n  <- m, b.w           b
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import groupby, pairwise

from thunder_zero.plan.params import ROOT
from thunder_zero.schedule.derived import regathered
from thunder_zero.schedule.lifetimes import bytes_alive, lifetimes
from thunder_zero.schedule.ops import Compute, Defer, Reduce, Return, Work
from thunder_zero.schedule.timeline import Timeline

# Other work is never recomputed, except for derived values.
RECOMPUTED = {*Work} - {Work.RANDOM, Work.OTHER, Work.NONE}


@dataclass(frozen=True, slots=True)
class Run:
    """A run of forward's operations that belong to one unit. The run is a range of indices."""

    unit: str
    first: int
    last: int


def runs(timeline: Timeline) -> list[Run]:
    """Return the runs of forward, in order. The runs depend on the program alone, not on shapes."""
    units, position = _units_of_values(timeline), _unit_positions(timeline)
    readers: list[tuple[str, int]] = []
    for index, op in enumerate(timeline.ops):
        if op.backward:
            break
        read = {unit for name in op.reads for unit in units.get(name, ())}
        if isinstance(op, Compute) and read and not all(name in units for name in op.writes):
            readers.append((max(read, key=position.__getitem__), index))
    grouped = [(unit, [index for _, index in run]) for unit, run in groupby(readers, key=lambda reader: reader[0])]
    return [Run(unit, indices[0], indices[-1]) for unit, indices in grouped]


def _unit_positions(timeline: Timeline) -> dict[str, int]:
    """Return the position of each unit in the module, the root first. An operation of several units belongs to the last
    unit."""
    return {ROOT: -1} | {unit: index for index, unit in enumerate(timeline.plan.units) if unit != ROOT}


def _units_of_values(timeline: Timeline) -> dict[str, frozenset[str]]:
    """Return a mapping from values that do not depend on data to the units of their parameters (none for constants)."""
    paths = {name: path for name, path in timeline.inputs.items() if path is not None}
    units = {name: frozenset((timeline.plan.by_name[paths[name]].unit,)) for name in timeline.replicated}
    units |= {name: frozenset((param.unit,)) for _, name, param in timeline.gathered}
    for op in timeline.ops:
        if isinstance(op, Compute) and op.repeatable and units.keys() >= set(op.reads):
            read = frozenset[str]().union(*(units[name] for name in op.reads))
            units.update(dict.fromkeys(op.writes, read))
    return units


def first_touches(timeline: Timeline) -> dict[str, int]:
    """Return a mapping from units, except the root, to the index where backward first needs the unit. There backward
    reads a value that a run of the unit computes, or a parameter of the unit that is gathered again."""
    ops_of_runs = ((run.unit, timeline.ops[run.first : run.last + 1]) for run in runs(timeline))
    unit_of = {name: unit for unit, ops in ops_of_runs for op in ops for name in op.writes}
    units = _units_of_values(timeline)
    position = _unit_positions(timeline)
    derived_names = units.keys() & regathered(timeline).keys()
    unit_of |= {name: max(units[name], key=position.__getitem__, default=ROOT) for name in derived_names}
    first: dict[str, int] = {}
    for index, op in enumerate(timeline.ops):
        for name in op.reads if op.backward and not isinstance(op, Return) else ():
            if unit := unit_of.get(name, ROOT):
                first.setdefault(unit, index)
    return first


def backward_ends(timeline: Timeline) -> dict[str, int]:
    """Return a mapping from units, except the root, to the index where backward reduces or defers their last gradient,
    in ascending order."""
    last: dict[str, int] = {}
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Reduce | Defer) and not timeline.is_second_reduction(op):
            last.update((param.unit, index) for param in timeline.params_of(op) if param.unit != ROOT)
    return dict(sorted(last.items(), key=lambda end: end[1]))


@dataclass(frozen=True)
class Segments:
    """The segments of forward, cut between the runs of units."""

    unit_at: tuple[str, ...]  # the unit of each operation of forward, or the root if the unit is not recomputed whole
    saved: frozenset[str]  # the memory that recomputed units compute and that is alive at a cut


def segments(timeline: Timeline) -> Segments:
    """Cut forward between units where the fewest bytes are alive, at the earliest of equally good indices."""
    runs_of_forward = runs(timeline)
    derived, stop = timeline.derived, timeline.backward_start
    lives = {memory: life for memory, life in lifetimes(timeline, stop).items() if memory not in derived}
    alive = bytes_alive(timeline, {memory: life[1:] for memory, life in lives.items()})  # before each operation
    cuts = [
        min(range(before.last + 1, after.first + 1), key=alive.__getitem__)
        for before, after in pairwise(runs_of_forward)
    ]
    ends = [*cuts, stop]
    unit_at: list[str] = []
    for run, end in zip(runs_of_forward, ends, strict=False):
        unit_at += [run.unit if run.unit in timeline.plan.recomputed else ROOT] * (end - len(unit_at))
    saved = {
        memory
        for memory, life in lives.items()
        if life.start < len(unit_at) and unit_at[life.start] != ROOT
        if (next_cut := bisect_right(cuts, life.start)) < len(cuts) and cuts[next_cut] in life
    }
    return Segments(tuple(unit_at), frozenset(saved))

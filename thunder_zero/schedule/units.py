"""Divides forward between units, for ``Policy.recompute="units"``.

An operation belongs to the unit whose parameters it reads. Between the last of one unit and the first of the next lies
the border, where the fewest bytes are alive::

    compute h  <- x0, a.w          a
    compute x1 <- x0, h            a             x1 is alive at the border: it is saved
    compute m  <- x1               b
    compute n  <- m, b.w           b
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from thunder_zero.plan import ROOT, Param
from thunder_zero.schedule.cone import cone, regathered
from thunder_zero.schedule.timeline import Kind, Timeline, Work

NOT_AGAIN = {Work.RANDOM, Work.OTHER, Work.NONE}  # work that is never done again, except in the cone


@dataclass(frozen=True, slots=True)
class Run:
    """Operations of forward that read parameters of one unit, with no other unit's between: the first, the last."""

    unit: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Touch:
    """The first operation of backward that needs a unit, and the value of forward, of this unit, that it reads."""

    at: int
    value: str


def is_vector(param: Param) -> bool:
    """Whether a parameter is a bias or the like, which backward may have for the sake of computing again alone."""
    return len(param.shape) <= 1


def runs(timeline: Timeline) -> list[Run]:
    """The runs of forward, in order. They depend on the program alone, not on shapes."""
    units, number = _units_of_values(timeline), _numbers(timeline)
    readers: list[tuple[str, int]] = []
    for at, op in enumerate(timeline.ops):
        if op.backward:
            break
        read = {unit for name in op.reads for unit in units.get(name, ())}
        if op.kind is Kind.COMPUTE and read and not all(name in units for name in op.writes):
            readers.append((max(read, key=number.__getitem__), at))
    grouped = [(unit, [at for _, at in run]) for unit, run in groupby(readers, key=lambda reader: reader[0])]
    return [Run(unit, positions[0], positions[-1]) for unit, positions in grouped]


def _numbers(timeline: Timeline) -> dict[str, int]:
    """The units in the order of the module, the root first: an operation of several belongs to the last."""
    return {ROOT: -1} | {unit: at for at, unit in enumerate(timeline.plan.units) if unit != ROOT}


def _units_of_values(timeline: Timeline) -> dict[str, frozenset[str]]:
    """The values that no data has gone into, each with the units of its parameters; constants have none."""
    paths = {name: path for name, path in timeline.inputs.items() if path is not None}
    units = {name: frozenset((timeline.plan.by_name[paths[name]].unit,)) for name in timeline.replicated}
    for op in timeline.ops:
        if timeline.ends(op, Kind.GATHER):
            pairs = zip(op.writes, timeline.params_of(op), strict=True)
            units.update((name, frozenset((param.unit,))) for name, param in pairs)
        elif op.kind is Kind.COMPUTE and op.repeatable and units.keys() >= set(op.reads):
            read = frozenset[str]().union(*(units[name] for name in op.reads))
            units.update(dict.fromkeys(op.writes, read))
    return units


def touches(timeline: Timeline, found: list[Run]) -> dict[str, Touch]:
    """For each unit but the root, where backward first reads a value of forward that is computed in one of its runs, or
    one of its parameters that backward gathers again."""
    unit_of = {name: run.unit for run in found for op in timeline.ops[run.first : run.last + 1] for name in op.writes}
    units = _units_of_values(timeline)
    again = regathered(timeline, cone(timeline))
    number = _numbers(timeline)
    unit_of |= {name: max(units[name], key=number.__getitem__, default=ROOT) for name in again if name in units}
    first: dict[str, Touch] = {}
    for at, op in enumerate(timeline.ops[:-1]):
        for name in op.reads if op.backward else ():
            if unit := unit_of.get(name, ROOT):
                first.setdefault(unit, Touch(at, name))
    return first


@dataclass(frozen=True)
class Segments:
    """Forward, cut at the borders between runs.

    Attributes:
        unit_at: for each operation of forward, its unit; the root for units that are not computed again whole.
        saved: the memory that is alive at the borders and that units have computed.
    """

    unit_at: tuple[str, ...]
    saved: frozenset[str]


def segments(timeline: Timeline) -> Segments:
    """Cuts forward between units where the fewest bytes are alive; among equals, as early as possible."""
    found = runs(timeline)
    written, read = _lifetimes(timeline)
    changes = [0] * (len(timeline.ops) + 1)
    for memory, at in written.items():
        changes[at + 1] += timeline.nbytes(memory)
        changes[read[memory] + 1] -= timeline.nbytes(memory)
    alive = list(accumulate(changes))  # bytes before each operation
    cuts = [min(range(a.last + 1, b.first + 1), key=alive.__getitem__) for a, b in pairwise(found)]
    ends = [*cuts, timeline.border]
    unit_at: list[str] = []
    for run, end in zip(found, ends, strict=False):
        unit_at += [run.unit if run.unit in timeline.plan.recomputed else ROOT] * (end - len(unit_at))
    saved = {
        memory
        for memory, at in written.items()
        if at < len(unit_at) and unit_at[at] != ROOT and (number := bisect_right(cuts, at)) < len(cuts)
        if cuts[number] <= read[memory]
    }
    return Segments(tuple(unit_at), frozenset(saved))


def _lifetimes(timeline: Timeline) -> tuple[dict[str, int], dict[str, int]]:
    """The memory that forward computes, with the position of its writer, and that of the last read in forward."""
    inside = cone(timeline)
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    for at, op in enumerate(timeline.ops[:-1]):
        if op.backward:
            break
        for name in op.reads:
            if (memory := timeline.memory(name)) in written:
                read[memory] = at
        for name in op.writes if op.kind is Kind.COMPUTE else ():
            if name not in inside and timeline.memory(name) == name:
                written[name] = read[name] = at
    return written, read

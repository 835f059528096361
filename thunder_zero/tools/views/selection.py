"""Selects rows to print, and formats timelines as text. Without Thunder.

::

    gather   fut0 <- t_w                           h.0.w
    wait     w <- fut0                             h.0.w
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.ops import Free, Op
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.table.rows import CODES, COMPUTES, Row

BORDER = "-- backward --"
VALUES_WIDTH = 32  # a fixed width, so that two timelines can be compared line by line


def format_timeline(timeline: Timeline, *, numbered: bool = False) -> str:
    """Return a line for each operation, in order, with its kind, writes, reads and parameters.

    FREEs of other values than gathered parameters are left out. Lines of recomputed operations end with "again". A
    border separates the phases. Lines may be long. A numbered line begins with "op 22", as errors name it.
    """
    lines: list[str] = []
    for index, op in enumerate(timeline.ops):
        if index == timeline.backward_start:
            lines.append(BORDER)
        if op.params or not isinstance(op, Free):
            lines.append(f"op {index:<4} " * numbered + _line(op))
    return "\n".join(lines)


def _line(op: Op) -> str:
    reads = ", ".join(op.reads)
    values = reads if isinstance(op, Free) else f"{', '.join(op.writes)} <- {reads}".strip()
    return f"{op.kind:<8} {values:<{VALUES_WIDTH}}  {', '.join(op.params)}{'  again' if op.repeated else ''}".rstrip()


ONLY: Mapping[str, Callable[[Row], bool]] = {
    "parameters": lambda row: bool(row.params),
    "communication": lambda row: row.kind in (*CODES, TENSOR, *CODES.values()),
}


def select(rows: Sequence[Row], plan: Plan, unit: str | None, only: str | None) -> tuple[Row | int, ...]:
    """Return the rows of a unit that ``ONLY[only]`` selects. The default is all units and all lines.

    A unit's rows extend from the first to the last row that waits for its parameters or computes with them. The unit's
    collectives and frees outside this range are included. A number stands for that many omitted rows.
    """
    if unit is not None and unit not in plan.units:
        raise ValueError(f"unit is {unit!r}; the units of this module are {', '.join(map(repr, plan.units))}")
    if only is not None and only not in ONLY:
        raise ValueError(f"only is {only!r}; choose {' or '.join(map(repr, ONLY))}, or None for all lines")
    candidates = range(len(rows)) if unit is None else _of_unit(rows, plan, unit)
    chosen = [index for index in candidates if only is None or ONLY[only](rows[index])]
    shown: list[Row | int] = list(rows[chosen[0] : chosen[0] + 1]) if chosen else []
    for previous, index in pairwise(chosen):
        between = rows[previous + 1 : index]
        gap = between if len(between) < 2 else [len(between)]  # a gap of one line would save nothing
        shown += [*gap, rows[index]]
    return tuple(shown)


def _of_unit(rows: Sequence[Row], plan: Plan, unit: str) -> list[int]:
    paths = {param.path for param in plan.params if param.unit == unit}
    touching = [index for index, row in enumerate(rows) if not paths.isdisjoint(row.params)]
    using = [
        index
        for index in touching
        if rows[index].kind in COMPUTES or (rows[index].kind == "wait" and not rows[index].gradients)
    ]
    return sorted({*touching, *(range(using[0], using[-1]) if using else ())})

"""``tz.tools.diff``: compares two programs of a module unit by unit, such as ZeRO-2 with ZeRO-3.

::

    ZeRO-2 -> ZeRO-3, rank 0 of 8; also prefetch 2 -> 0
    unit                 gathers  reduces              sent          gathered  recomputed  its FLOP
    blocks.0 .. 3, each   1 -> 2        1  3.00 -> 4.00 MiB  4.00 -> 2.00 MiB          0           0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import groupby, zip_longest
from textwrap import wrap

from thunder_zero.plan.amounts import WIDTH, name_of, size, summed_up
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import ROOT, Param, Plan
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Free, Gather
from thunder_zero.schedule.units import backward_ends
from thunder_zero.tools.printing.words import aligned, count
from thunder_zero.tools.table.rows import Row, totals
from thunder_zero.tools.table.table import Table, step_table
from thunder_zero.traces.compiled import Traces

SHORT = 30  # columns
MOST = 12  # the most lines of units in a summary
# the figures of one rank in a step, for one unit or for all units, and their texts
COLUMNS: dict[str, Callable[[int], str]] = {
    "gathers": str,  # the number of launches that gather parameters
    "reduces": str,  # the number of launches that reduce gradients
    "sent": size,  # the bytes that the rank sends in all launches
    "gathered": size,  # the most bytes of gathered parameters alive at once
    # the number of forward operations that backward recomputes. Operations are counted before fusion, and views of
    # parameters are not counted.
    "recomputed": str,
    "its FLOP": count,  # of the recomputed matrix products, attention and convolutions
}
Pair = tuple[dict[str, int], dict[str, int]]


def diff(first: Traces, second: Traces) -> Difference:
    """Return the differences between two programs of a module, unit by unit. The result prints as a table.

    >>> zero2, zero3 = (tz.trace(model, tokens, policy=stage, world_size=8) for stage in (2, 3))
    >>> print(tz.tools.diff(zero2, zero3))
    """
    for traces in (first, second):
        if not isinstance(traces, Traces):
            raise TypeError(f"diff takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    require_one_module(first, second)
    return difference_of(step_table(first), step_table(second))


@dataclass(frozen=True, repr=False)
class Difference:
    """The differences between two programs of one module, as pairs (first program, second program)."""

    tables: tuple[Table, Table]  # the tables of both programs. Their memory is without a loss and an optimizer.
    # pairs of figures, keyed by the unit's path, in the order of forward. The key "" is the root unit. A figure has the
    # name of its column, such as "gathers".
    units: dict[str, Pair]
    # the pair of figures of all units together, with the launches of torch's tensor parallelism: "slices", and "sent by
    # slices"
    total: Pair

    def __repr__(self) -> str:
        sent = _change(*(size(figures["sent"]) for figures in self.total))
        return summed_up(self, f"{_title(*self.tables)}; this rank sends {sent} in a step")

    def __str__(self) -> str:
        """Return the table with at most 12 lines of units."""
        return "\n".join(_lines(self, MOST))

    def table(self) -> str:
        """Return the text of ``str(self)``, but with all units. Neighbouring units with equal figures share a line."""
        return "\n".join(_lines(self, len(self.units)))


def difference_of(first: Table, second: Table) -> Difference:
    by_unit = [_by_unit(table) for table in (first, second)]
    units = {unit: (by_unit[0][unit], by_unit[1][unit]) for unit in first.traces.plan.units}
    return Difference((first, second), units, (by_unit[0][None], by_unit[1][None]))


def require_one_module(first: Traces, second: Traces) -> None:
    """Raise ValueError unless both programs are of one module and of one kind."""
    if first.facts.synced is not second.facts.synced:
        raise ValueError("one of the programs runs under no_sync and the other does not; compare programs of one kind")
    for param, other in zip_longest(first.plan.params, second.plan.params):
        described, expected = _described(param, first.plan), _described(other, second.plan)
        if described != expected or param is None or other is None:
            raise ValueError(
                f"the traces are of different modules, or ignore different parameters: the first has {described} where "
                f"the second has {expected}; trace one module twice"
            )
        if param.unit != other.unit:
            raise ValueError(
                f"the traces divide the module differently: {param.path!r} is of unit {param.unit!r} in the first and "
                f"of {other.unit!r} in the second; give both the same Policy.unit_of"
            )


def _described(param: Param | None, plan: Plan) -> str:
    if param is None:
        return "no further parameter"
    frozen = "" if param.requires_grad else ", frozen"
    return f"{param.path!r} {plan.whole_shape(param)} {name_of(param.dtype)}{frozen}"


def _by_unit(table: Table) -> dict[str | None, dict[str, int]]:
    """Return a mapping from units to figures. The key None has the totals."""
    timeline, rows = table.traces.timeline, defaultdict[str | None, list[Row]](list)
    ends = backward_ends(timeline).items()
    for row in table.all_rows:
        rows[None].append(row)
        if row.kind != TENSOR:
            # operations are computed again for the unit whose gradients are complete next
            unit = next((unit for unit, end in ends if end >= row.ran), ROOT) if row.repeats else row.unit
            rows[unit].append(row)
    moves = tuple(op for op in timeline.ops if isinstance(op, Gather | Free) and op.params)
    gathered = replace(timeline, ops=moves)
    most = {unit: max(gathered_bytes(gathered, unit), default=0) for unit in (*table.traces.plan.units, None)}
    return {unit: totals(rows[unit]) | {"gathered": nbytes} for unit, nbytes in most.items()}


def _lines(difference: Difference, max_groups: int) -> Iterator[str]:
    yield from wrap(_title(*difference.tables), WIDTH, subsequent_indent="  ")
    groups = list(alike(difference))
    rows = [*groups[:max_groups], ("all", *_cells(difference.total))]
    room = WIDTH - sum(max(map(len, column)) + 2 for column in zip(COLUMNS, *(row[1:] for row in rows), strict=True))
    rows = [(name if len(name) <= room else f"…{name[1 - room :]}", *cells) for name, *cells in rows]
    lines = aligned([("unit", *COLUMNS), *rows]).splitlines()
    if len(groups) > max_groups:
        lines.insert(-1, f"... {len(groups) - max_groups} more: table() has them")
    yield from lines
    memories = [table.memory for table in difference.tables if table.memory]
    if len(memories) == 2:
        at_rest = _change(*(size(memory.at_rest) for memory in memories))
        peaks = _change(*(size(memory.peak) for memory in memories))
        yield f"memory: {at_rest} at rest, {peaks} at the peak, without a loss and an optimizer"
    yield "sent: by this rank in a step; gathered: the most bytes of full parameters at once"
    counts, sent = ([figures[name] for figures in difference.total] for name in ("slices", "sent by slices"))
    if any(counts):
        launches = f"collectives of tensor parallelism: {_change(*map(str, counts))}"
        yield f"{launches}, which send {_change(*map(size, sent))} of all"


def _title(first: Table, second: Table) -> str:
    plans = first.traces.plan, second.traces.plan
    stages = [STAGES[plan.policy.stage].name for plan in plans]
    copies = [f", {plan.mesh.replicate.size} copies" * (plan.mesh.replicate.size > 1) for plan in plans]
    worlds = [f"{plan.mesh}{of_copies}" for plan, of_copies in zip(plans, copies, strict=True)]
    changed = ", ".join(_changed(*(plan.policy for plan in plans)))
    return f"{_change(*stages)}, {_change(*worlds)}{f'; also {changed}' if changed else ''}"


def _changed(first: Policy, second: Policy) -> Iterator[str]:
    """Yield the changed fields of the policy, such as ``prefetch 2 -> 0``. Long values are left out."""
    for name in [field.name for field in fields(Policy) if field.name != "stage"]:
        if getattr(first, name) != getattr(second, name):
            change = _change(str(getattr(first, name)), str(getattr(second, name)))
            yield f"{name} {change}" if len(change) <= SHORT else name


def alike(difference: Difference) -> Iterator[tuple[str, ...]]:
    """Yield rows of neighbouring units with equal figures: their label, such as ``blocks.0 .. 3, each``, and cells."""
    for pair, group in groupby(difference.units, key=lambda unit: difference.units[unit]):
        units = list(group)
        is_of_one_parent = len({unit.rpartition(".")[0] for unit in units}) == 1
        last = units[-1].rpartition(".")[2] if is_of_one_parent else units[-1]
        several = f"{units[0] or 'root'} .. {last or 'root'}, each"
        yield several if units[1:] else units[0] or "root unit", *_cells(pair)


def _cells(pair: Pair) -> tuple[str, ...]:
    return tuple(_change(*(text(figures[name]) for figures in pair)) for name, text in COLUMNS.items())


def _change(first: str, second: str) -> str:
    if first == second:
        return first
    if first.partition(" ")[2] == second.partition(" ")[2] != "":  # write an equal unit of measure once
        first = first.partition(" ")[0] if first[0].isdigit() and second[0].isdigit() else first
    return f"{first} -> {second}"

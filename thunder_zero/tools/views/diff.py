"""``tz.tools.diff``: compares two programs of a module unit by unit, such as ZeRO-2 with ZeRO-3.

::

    ZeRO-2 -> ZeRO-3, rank 0 of 8; also prefetch 2 -> 0
    unit                 gathers  reduces              sent          gathered  recomputed  its FLOP
    blocks.0 .. 3, each   1 -> 2        1  3.00 -> 4.00 MiB  4.00 -> 2.00 MiB          0           0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, zip_longest
from textwrap import wrap

from thunder_zero.plan.amounts import name_of, size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import ROOT, Param, Plan
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Compute
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.units import backward_ends
from thunder_zero.tools.printing.text import table_of, text_of_table
from thunder_zero.tools.printing.words import WIDTH, count, summed_up
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

    Args:
        first, second: results of :func:`thunder_zero.trace` or :func:`thunder_zero.traces_of` for one module.

    Raises:
        TypeError: an argument is not a ``Traces``.
        ValueError: the modules differ in a parameter or in their units, or only one program is for ``no_sync``.
    """
    for traces in (first, second):
        if not isinstance(traces, Traces):
            raise TypeError(f"diff takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    require_one_module(first, second)
    return difference_of(step_table(first), step_table(second))


@dataclass(frozen=True, repr=False)
class Difference:
    """The differences between two programs of one module, as pairs (first program, second program).

    Attributes:
        tables: the tables of both programs. Their memory is without a loss and an optimizer.
        units: pairs of figures, keyed by the unit's path, in the order of forward. The key "" is the root unit. A
            figure has the name of its column, such as "gathers".
        total: the pair of figures of all units together, with the launches of torch's tensor parallelism: "slices",
            and "sent by slices".
    """

    tables: tuple[Table, Table]
    units: dict[str, Pair]
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
    """Return the differences between two tables."""
    by_unit = [_by_unit(table) for table in (first, second)]
    units = {unit: (by_unit[0][unit], by_unit[1][unit]) for unit in first.traces.plan.units}
    return Difference((first, second), units, (by_unit[0][None], by_unit[1][None]))


def require_one_module(first: Traces, second: Traces) -> None:
    """Raise ValueError unless both programs are of one module and of one kind."""
    if first.facts.synced is not second.facts.synced:
        raise ValueError("one of the programs runs under no_sync and the other does not; compare programs of one kind")
    for param, other in zip_longest(first.plan.params, second.plan.params):
        if param is None or other is None or _identity(param, first.plan) != _identity(other, second.plan):
            raise ValueError(
                f"the traces are of different modules, or ignore different parameters: the first has "
                f"{_described(param, first.plan)} where the second has {_described(other, second.plan)}; "
                f"trace one module twice"
            )
        if param.unit != other.unit:
            raise ValueError(
                f"the traces divide the module differently: {param.path!r} is of unit {param.unit!r} in the first and "
                f"of {other.unit!r} in the second; give both the same Policy.unit_of"
            )


def _identity(param: Param, plan: Plan) -> tuple[object, ...]:
    return param.path, plan.whole_shape(param), param.dtype, param.requires_grad


def _described(param: Param | None, plan: Plan) -> str:
    if param is None:
        return "no further parameter"
    frozen = "" if param.requires_grad else ", frozen"
    return f"{param.path!r} {plan.whole_shape(param)} {name_of(param.dtype)}{frozen}"


def _by_unit(table: Table) -> dict[str | None, dict[str, int]]:
    """Return a mapping from units to figures. The key None has the totals."""
    recomputed = _recomputed_ops(run(table.traces.lifted))
    return {unit: _figures(table, recomputed, unit) for unit in (*table.traces.plan.units, None)}


def _figures(table: Table, recomputed: Sequence[tuple[Compute, str]], unit: str | None) -> dict[str, int]:
    launches, sent = Counter[str](), Counter[str]()
    for row in table.rows:
        if row.sent is not None and (unit is None or (row.unit == unit and row.kind != TENSOR)):
            launches[row.kind] += 1
            sent[row.kind] += row.sent
    recomputed_in_unit = [op for op, unit_of_op in recomputed if unit in (None, unit_of_op)]
    return {
        "gathers": launches["gather"],
        "reduces": launches["reduce"],
        "sent": sent.total(),
        "gathered": max(gathered_bytes(table.traces.timeline, unit), default=0),
        "recomputed": len(recomputed_in_unit),
        "its FLOP": sum(op.flops for op in recomputed_in_unit),
        "slices": launches[TENSOR],
        "sent by slices": sent[TENSOR],
    }


def _recomputed_ops(timeline: Timeline) -> list[tuple[Compute, str]]:
    """Return (operation, unit) pairs. The operation recomputes a forward value in the unit's backward.

    Operations that read only parameters are left out. ``timeline`` must be scheduled, but not fused: fusers merge
    operations.
    """
    ends = backward_ends(timeline).items()
    return [
        # the next unit whose gradients are complete
        (op, next((unit for unit, end in ends if end >= index), ROOT))
        for index, op in enumerate(timeline.ops)
        if isinstance(op, Compute) and timeline.recomputes(op)
    ]


def _lines(difference: Difference, max_groups: int) -> Iterator[str]:
    yield from wrap(_title(*difference.tables), WIDTH, subsequent_indent="  ")
    groups = [(pair, list(names)) for pair, names in groupby(difference.units, key=lambda unit: difference.units[unit])]
    shown = groups[:max_groups]
    cells = [*(_cells(pair) for pair, _ in shown), _cells(difference.total)]
    room_for_names = WIDTH - sum(max(map(len, column)) + 2 for column in zip(COLUMNS, *cells, strict=True))
    names = [*(_names(units, room_for_names) for _, units in shown), "all"]
    rows = [(name, *row) for name, row in zip(names, cells, strict=True)]
    lines = text_of_table(table_of(("unit", *COLUMNS), rows, ("unit",)), WIDTH).splitlines()
    if len(groups) > max_groups:
        lines.insert(-1, f"... {len(groups) - max_groups} more: table() has them")
    yield from lines
    memories = [table.memory for table in difference.tables if table.memory]
    if len(memories) == 2:
        at_rest, peaks = (
            _change(*(size(getattr(memory, name)) for memory in memories)) for name in ("at_rest", "peak")
        )
        yield f"memory: {at_rest} at rest, {peaks} at the peak, without a loss and an optimizer"
    yield "sent: by this rank in a step; gathered: the most bytes of full parameters at once"
    counts, sent = ([figures[name] for figures in difference.total] for name in ("slices", "sent by slices"))
    if any(counts):
        launches = f"collectives of tensor parallelism: {_change(*map(str, counts))}"
        yield f"{launches}, which send {_change(*map(size, sent))} of all"


def _title(first: Table, second: Table) -> str:
    worlds, stages = [], []
    for plan in (first.traces.plan, second.traces.plan):
        copies = f", {count} copies" if (count := plan.mesh.replicate.size) > 1 else ""
        worlds.append(f"{plan.mesh}{copies}")
        stages.append(STAGES[plan.policy.stage].name)
    changed = ", ".join(_changed(first.traces.plan.policy, second.traces.plan.policy))
    return f"{_change(*stages)}, {_change(*worlds)}{f'; also {changed}' if changed else ''}"


def _changed(first: Policy, second: Policy) -> Iterator[str]:
    """Yield the changed fields of the policy, such as ``prefetch 2 -> 0``. Long values are left out."""
    for name in [field.name for field in fields(Policy) if field.name != "stage"]:
        old_value, new_value = getattr(first, name), getattr(second, name)
        if old_value != new_value:
            change = _change(str(old_value), str(new_value))
            yield f"{name} {change}" if len(change) <= SHORT else name


def _names(units: Sequence[str], width: int) -> str:
    """Return the label of a line that neighbouring units share, such as ``blocks.0 .. 3, each``."""
    if len(units) > 1:
        parents = {unit.rpartition(".")[0] for unit in units}
        last = units[-1].rpartition(".")[2] if len(parents) == 1 else units[-1]
        name = f"{units[0] or 'root'} .. {last or 'root'}, each"
    else:
        name = "root unit" if units[0] == ROOT else units[0]
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _cells(pair: Pair) -> tuple[str, ...]:
    return tuple(_change(*(text(figures[name]) for figures in pair)) for name, text in COLUMNS.items())


def _change(first: str, second: str) -> str:
    if first == second:
        return first
    if first.partition(" ")[2] == second.partition(" ")[2] != "":  # write an equal unit of measure once
        first = first.partition(" ")[0] if first[0].isdigit() and second[0].isdigit() else first
    return f"{first} -> {second}"

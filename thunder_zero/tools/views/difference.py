"""Holds the differences between two programs, by unit: frozen data with a printed form.

::

    ZeRO-2 -> ZeRO-3, rank 0 of 8; also prefetch 2 -> 0
    unit                 gathers  reduces              sent          gathered  recomputed  its FLOP
    blocks.0 .. 3, each   1 -> 2        1  3.00 -> 4.00 MiB  4.00 -> 2.00 MiB          0           0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from textwrap import wrap

from thunder_zero.plan.amounts import size
from thunder_zero.plan.params import ROOT, Plan
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.tools.printing.text import table_of, text_of_table
from thunder_zero.tools.printing.words import WIDTH, count, summed_up

SHORT = 30  # columns
MOST = 12  # the most lines of units in a summary


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one rank in a step, for one unit or for all units."""

    gathers: int  # the number of launches that gather parameters
    reductions: int  # the number of launches that reduce gradients
    # gather_bytes, reduce_bytes: the bytes that gathers and reductions send
    gather_bytes: int
    reduce_bytes: int
    slices: int  # the number of launches of torch's tensor parallelism. It is 0 for a single unit.
    slice_bytes: int  # the bytes that these launches send
    gathered_at_most: int  # the most bytes of gathered parameters alive at once
    # the number of forward operations that backward recomputes. Operations are counted before fusion, and views of
    # parameters are not counted.
    recomputed: int
    recomputed_flops: int  # FLOPs of the recomputed matrix products, attention and convolutions

    @property
    def sent_bytes(self) -> int:
        """The bytes that the rank sends in all launches."""
        return self.gather_bytes + self.reduce_bytes + self.slice_bytes


Pair = tuple[Figures, Figures]


@dataclass(frozen=True, repr=False)
class Difference:
    """The differences between two programs of one module, as pairs (first program, second program).

    Attributes:
        plans: the plans of both programs.
        units: pairs of figures, keyed by the unit's path, in the order of forward. The key "" is the root unit.
        total: the pair of figures of all units together.
        peaks: the peak of memory in forward and backward, from ``tz.tools.memory``; None without a forecast.
        at_rest: bytes of memory between steps; None without a forecast.
    """

    plans: tuple[Plan, Plan]
    units: dict[str, Pair]
    total: Pair
    peaks: tuple[int, int] | None
    at_rest: tuple[int, int] | None

    def __repr__(self) -> str:
        sent = _change(*(size(figures.sent_bytes) for figures in self.total))
        return summed_up(self, f"{_title(*self.plans)}; this rank sends {sent} in a step")

    def __str__(self) -> str:
        """Return the table with at most 12 lines of units."""
        return "\n".join(_lines(self, MOST))

    def table(self) -> str:
        """Return the text of ``str(self)``, but with all units. Neighbouring units with equal figures share a line."""
        return "\n".join(_lines(self, len(self.units)))


COLUMNS: dict[str, Callable[[Figures], str]] = {
    "gathers": lambda figures: str(figures.gathers),
    "reduces": lambda figures: str(figures.reductions),
    "sent": lambda figures: size(figures.sent_bytes),
    "gathered": lambda figures: size(figures.gathered_at_most),
    "recomputed": lambda figures: str(figures.recomputed),
    "its FLOP": lambda figures: count(figures.recomputed_flops),
}


def _lines(difference: Difference, max_groups: int) -> Iterator[str]:
    yield from wrap(_title(*difference.plans), WIDTH, subsequent_indent="  ")
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
    if difference.peaks is not None and difference.at_rest is not None:
        at_rest, peaks = _change(*map(size, difference.at_rest)), _change(*map(size, difference.peaks))
        yield f"memory: {at_rest} at rest, {peaks} at the peak, without a loss and an optimizer"
    yield "sent: by this rank in a step; gathered: the most bytes of full parameters at once"
    counts, sent = ([getattr(figures, name) for figures in difference.total] for name in ("slices", "slice_bytes"))
    if any(counts):
        launches = f"collectives of tensor parallelism: {_change(*map(str, counts))}"
        yield f"{launches}, which send {_change(*map(size, sent))} of all"


def _title(first: Plan, second: Plan) -> str:
    worlds, stages = [], []
    for plan in (first, second):
        copies = f", {count} copies" if (count := plan.mesh.replicate.size) > 1 else ""
        worlds.append(f"{plan.mesh}{copies}")
        stages.append(STAGES[plan.policy.stage].name)
    changed = ", ".join(_changed(first.policy, second.policy))
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
    return tuple(_change(column(pair[0]), column(pair[1])) for column in COLUMNS.values())


def _change(first: str, second: str) -> str:
    if first == second:
        return first
    if first.partition(" ")[2] == second.partition(" ")[2] != "":  # write an equal unit of measure once
        first = first.partition(" ")[0] if first[0].isdigit() and second[0].isdigit() else first
    return f"{first} -> {second}"

"""What programs on one page do differently: rows of text, ready to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from thunder_zero.tools.ask.diff import diff
from thunder_zero.tools.ask.difference import COLUMNS
from thunder_zero.tools.page.data import figures_of, text_of
from thunder_zero.tools.page.program import PageProgram

WORDS = {
    "step_seconds": "time of a step",
    "compute_seconds": "of it, compute",
    "exposed_seconds": "of it, waiting for communication",
    "peak_bytes": "peak memory of forward and backward",
    "at_rest_bytes": "memory between steps",
    "optimizer_step_bytes": "peak memory of the optimizer's step",
    "sent_bytes": "sent by this rank",
    "gathers": "gathers",
    "reductions": "reductions",
    "slices": "collectives of slices",
    "mfu": "MFU",
}


def differences(programs: Sequence[PageProgram]) -> list[dict[str, Any]]:
    """Tables, each with a title, heads and rows; none of a program alone. The first has the figures of all programs.
    For each that has other traces than the first one, another has what :func:`thunder_zero.tools.diff` says of each
    unit; those in a row that do the same share one."""
    if len(programs) < 2:
        return []
    figures = [figures_of(program) for program in programs]
    names = [name for name in WORDS if name != "slices" or any(one[name] for one in figures)]
    rows = [[WORDS[name], *(text_of(name, one[name]) for one in figures)] for name in names]
    tables = [{"title": "A step", "heads": ["", *(program.name for program in programs)], "rows": rows}]
    others = [program for program in programs if program.traces is not programs[0].traces]
    return tables + [
        {
            "title": f"{programs[0].name} \N{RIGHTWARDS ARROW} {other.name}, by unit",
            "heads": ["unit", *COLUMNS],
            "rows": list(_by_unit(programs[0], other)),
        }
        for other in others
    ]


def _by_unit(first: PageProgram, second: PageProgram) -> Iterator[list[str]]:
    units = diff(first.traces, second.traces).units
    for pair, names in groupby(units, key=lambda unit: units[unit]):
        of = [name or "root unit" for name in names]
        cells = ([column(one) for one in pair] for column in COLUMNS.values())
        yield [f"{of[0]} .. {of[-1]}, each" if of[1:] else of[0], *(change(*cell) for cell in cells)]


def change(first: str, second: str) -> str:
    """``1.50 MiB -> 2.00 MiB`` with an arrow, or what both are."""
    return first if first == second else f"{first} \N{RIGHTWARDS ARROW} {second}"

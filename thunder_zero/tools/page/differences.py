"""Compares the programs of a page in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from thunder_zero.tools.page.data import figures_of, text_of
from thunder_zero.tools.page.program import PageProgram
from thunder_zero.tools.views.diff import compare_units
from thunder_zero.tools.views.difference import COLUMNS

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
    """Return tables with a title, heads and rows. A page with one program has no tables.

    The first table has the figures of all programs. Each further table compares a program with the first program, unit
    by unit, as :func:`thunder_zero.tools.diff` does. Neighbouring units with equal figures share a row.
    """
    if len(programs) < 2:
        return []
    figures = [figures_of(program) for program in programs]
    names = [name for name in WORDS if name != "slices" or any(program_figures[name] for program_figures in figures)]
    rows = [[WORDS[name], *(text_of(name, program_figures[name]) for program_figures in figures)] for name in names]
    tables = [{"title": "A step", "heads": ["", *(program.name for program in programs)], "rows": rows}]
    other_programs = [program for program in programs if program.table.traces is not programs[0].table.traces]
    return tables + [
        {
            "title": f"{programs[0].name} \N{RIGHTWARDS ARROW} {other.name}, by unit",
            "heads": ["unit", *COLUMNS],
            "rows": list(_rows_by_unit(programs[0], other)),
        }
        for other in other_programs
    ]


def _rows_by_unit(first: PageProgram, second: PageProgram) -> Iterator[list[str]]:
    units, _ = compare_units(first.table.traces, second.table.traces)
    for pair, group in groupby(units, key=lambda unit: units[unit]):
        names = [name or "root unit" for name in group]
        cells = ([column(figures) for figures in pair] for column in COLUMNS.values())
        yield [f"{names[0]} .. {names[-1]}, each" if names[1:] else names[0], *(change(*cell) for cell in cells)]


def change(first: str, second: str) -> str:
    """Return ``1.50 MiB -> 2.00 MiB`` with a real arrow, or the text alone if both are equal."""
    return first if first == second else f"{first} \N{RIGHTWARDS ARROW} {second}"

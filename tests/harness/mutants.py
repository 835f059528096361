"""Makes recorded steps wrong in one place: each reduction, group, divisor and gather, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose, prod
from typing import Any

from thunder_zero.spmd.check import run_ranks
from thunder_zero.spmd.lines import RecordedLine, StepRecord
from thunder_zero.spmd.ranks import record_step, types_of
from thunder_zero.spmd.report import verdict_of
from thunder_zero.spmd.rules import FACTORS


def mutants(record: StepRecord) -> Iterator[tuple[str, StepRecord]]:
    """Yield wrong records with what was changed."""
    for index, line in enumerate(record.lines):
        for what, changed in wrong_lines(line, record.axes):
            lines = (*record.lines[:index], changed, *record.lines[index + 1 :])
            yield f"{what} of {line.name} ({line.where})", replace(record, lines=lines)


def wrong_lines(line: RecordedLine, axes: Mapping[str, int]) -> Iterator[tuple[str, RecordedLine]]:
    item = line.collective
    if (
        item is not None
        and item.kind in ("all_reduce", "reduce_scatter", "all_gather")
        and item.op not in ("max", "min")
    ):
        yield "no sending", replace(line, collective=replace(item, axes=("no axis",)))
        for axis in axes:
            if axis not in item.axes:
                yield f"group {axis}", replace(line, collective=replace(item, axes=(axis,)))
        if item.op in ("sum", "avg"):
            yield "divisor", replace(line, collective=replace(item, op="avg" if item.op == "sum" else "sum"))
    elif line.name in FACTORS and len(line.args) > 1 and isinstance(line.args[1], int | float):
        sizes = [*axes.values(), prod(axes.values())]
        if "div" in line.name and any(isclose(float(line.args[1]), size) for size in sizes):
            yield "divisor", replace(line, args=(line.args[0], 1.0, *line.args[2:]))


def unnoticed(step: Any, shape: Mapping[str, int], data: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of mutants of a step, and those of which nothing is said."""
    return run_ranks((f"{__name__}:try_mutants", (step, shape, data)), step, shape, data, 300.0)


def try_mutants(step: Any, shape: Mapping[str, int], data: Sequence[str], results: Any) -> tuple[int, list[str]]:
    wrong = list(mutants(record_step(step, shape)))
    others, memo = results(), dict[Any, Any]()
    verdicts = [(what, verdict_of(record, types_of(record, others, data, memo), data, [])) for what, record in wrong]
    return len(wrong), [what for what, verdict in verdicts if verdict.status != 1]

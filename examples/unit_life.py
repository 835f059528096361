"""One unit's life in a step, from the program that ran: gathered, used, freed, reduced, with a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rich.console import Console
from show import WIDTH, mb

import thunder_zero as tz
from thunder_zero.tools.table.rows import Row
from thunder_zero.tools.views.explain import why_free

INDENT = 12  # columns


def print_life(traces: tz.tools.Traces, console: Console) -> None:
    """Print the life of the unit that a step gathers most often, by its largest parameter, and how to print the rest.

    Args:
        traces: of a training step.
        console: rank 0's.
    """
    for line in _lines(traces):
        console.print(line, markup=False, soft_wrap=True)


def _lines(traces: tz.tools.Traces) -> Iterator[str]:
    plan = traces.plan
    gathers = [path for op in traces.timeline.ops if isinstance(op, tz.schedule.Gather) for path in op.params]
    inside = [param for param in plan.params if param.unit]
    param = max(inside, key=lambda one: (gathers.count(one.path), one.full_bytes))
    life = tz.explain(traces, param.path)
    yield f"\nThe life of {param.path}, of unit {param.unit}, in the program of one step:"
    for number, rows in enumerate(life.gathers):
        bucket = _bucket(rows["gather"], "parameter", traces)
        name = "gathered" if number == 0 else "regathered"
        yield from _event(name, rows["gather"], f"the ranks send each other their rows of {bucket}")
        if "first use" in rows:
            sentence = "the first line that computes with the full parameter, or a view of it"
            yield from _event("used", rows["first use"], sentence)
        if "free" in rows:
            why = why_free(life.step, rows["wait"], rows["free"], is_read="first use" in rows)
            yield from _event("freed", rows["free"], f"{why}; this rank is back to its rows")
    if "reduce" in life.gradient:
        own = "each rank keeps those of its rows" if param.sharded else "each rank gets all of them"
        launch = life.gradient["reduce"]
        yield from _event("reduced", launch, f"the ranks average {_bucket(launch, 'gradient', traces)}; {own}")
    yield from wrap(f"That is because {life.lifetime}.", WIDTH)
    yield f'More of this parameter: print(tz.explain(tz.traces_of(model), "{param.path}"))'
    yield f'The lines of this unit: tz.print_trace(model, unit="{param.unit}"); of all: tz.print_trace(model)'


def _bucket(launch: Row, noun: str, traces: tz.tools.Traces) -> str:
    nbytes = traces.timeline.traffic(traces.timeline.ops[launch.op or 0]).full
    return f"{len(launch.params)} {noun}s, {mb(nbytes)} in full" if len(launch.params) > 1 else f"one {noun}"


def _event(name: str, line: Row, sentence: str) -> Iterator[str]:
    code = f"{name:{INDENT}}{line.statement}"
    yield code if len(code) <= WIDTH else f"{code[: WIDTH - 1]}…"
    indent = " " * INDENT
    yield from wrap(f"{line.phase}: {sentence}", WIDTH, initial_indent=indent, subsequent_indent=indent)

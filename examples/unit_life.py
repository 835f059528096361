"""One unit's life in a step, from the program that ran: gathered, used, freed, reduced, with a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from rich.console import Console
from show import WIDTH, mb

import thunder_zero as tz
from thunder_zero.tools.table.rows import Row
from thunder_zero.tools.views.explanation import Gathered, Reduced

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
    for number, gather in enumerate(life.gathers):
        yield from _gathered(gather, "gathered" if number == 0 else "regathered")
    if life.gradient is not None:
        own = "each rank keeps those of its rows" if param.sharded else "each rank gets all of them"
        yield from _event(
            "reduced", life.gradient.launch, f"the ranks average {_bucket(life.gradient, 'gradient')}; {own}"
        )
    yield from wrap(f"That is because {life.lifetime}.", WIDTH)
    yield f'More of this parameter: print(tz.explain(tz.traces_of(model), "{param.path}"))'
    yield f'The lines of this unit: tz.print_trace(model, unit="{param.unit}"); of all: tz.print_trace(model)'


def _gathered(gather: Gathered, name: str) -> Iterator[str]:
    yield from _event(name, gather.launch, f"the ranks send each other their rows of {_bucket(gather, 'parameter')}")
    if gather.first_read is not None:
        yield from _event(
            "used", gather.first_read, "the first line that computes with the full parameter, or a view of it"
        )
    if gather.free is not None:
        yield from _event("freed", gather.free, f"{gather.why_free}; this rank is back to its rows")


def _bucket(one: Gathered | Reduced, noun: str) -> str:
    return f"{len(one.bucket)} {noun}s, {mb(one.bucket_bytes)} in full" if len(one.bucket) > 1 else f"one {noun}"


def _event(name: str, line: Row, sentence: str) -> Iterator[str]:
    code = f"{name:{INDENT}}{line.statement}"
    yield code if len(code) <= WIDTH else f"{code[: WIDTH - 1]}…"
    indent = " " * INDENT
    yield from wrap(f"{line.phase}: {sentence}", WIDTH, initial_indent=indent, subsequent_indent=indent)

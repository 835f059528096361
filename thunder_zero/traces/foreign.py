"""Checks that a foreign transform of a finished trace kept our lines, by comparing them as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import zip_longest

from thunder_zero.schedule.ops import Free
from thunder_zero.schedule.timeline import ScheduleError, Timeline
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core import prims
from thunder.core.trace import TraceCtx

SHOWN = 80  # characters of a line in an error


def require_own_lines(before: TraceCtx, after: TraceCtx, timeline: Timeline, executor: ZeroExecutor, name: str) -> None:
    """Raise ScheduleError if the transform ``name`` of a finished trace changed, dropped or moved one of our lines.

    The ``del`` of a gathered parameter, or of a view of it, is one of our lines, too.
    """
    if not isinstance(after, TraceCtx):
        raise ScheduleError(f"{name} returned a {type(after).__name__}; return the trace that it was given")
    freed = {value for op in timeline.ops if isinstance(op, Free) for value in op.reads if value in timeline.derived}
    old, new = (_own_lines(trace, freed, executor) for trace in (before, after))
    for line, other in zip_longest(old, new, fillvalue=""):
        if line != other:
            raise ScheduleError(
                f"{name} changed, moved or dropped a line of the schedule, which was proved: "
                f"{(line or other)[:SHOWN]}; leave lines of thunder_zero, and the del of what they gather, in place "
                f"and in order"
            )


def _own_lines(trace: TraceCtx, freed: Collection[str], executor: ZeroExecutor) -> Iterator[str]:
    for line in trace.bound_symbols:
        if line.sym.id is prims.PrimIDs.DEL:
            yield from (f"del {proxy.name}" for proxy in line.flat_proxy_args if proxy.name in freed)
        elif line.sym.executor is executor:
            yield line.python(indent=0)[0].partition("  # ")[0]

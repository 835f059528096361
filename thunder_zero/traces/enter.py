"""Names phases for ranks to compare, and checks that a foreign transform kept our lines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import zip_longest

from thunder_zero.plan.mesh import SHARD
from thunder_zero.schedule.timeline import ScheduleError
from thunder_zero.traces.coded import paths_of
from thunder_zero.traces.symbols import Facts, ZeroExecutor, axis_of

from thunder.core import prims
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

SHOWN = 80  # characters of a line in an error


def launches_of(trace: TraceCtx, executor: ZeroExecutor) -> list[str]:
    """Return the launches of a phase in order, such as ``all_gather h.0.w, h.0.b``. Frees and waits are left out, since
    they may differ between ranks: recomputing depends on the shapes of a rank's inputs."""
    launches = []
    for line in trace.bound_symbols:
        if (symbol := executor.launches.get(line.sym.name)) is not None:
            name = symbol.name.removeprefix("zero_")
            suffix = f" over {axis_of(line)}" * bool(executor.axis(SHARD))
            launches.append(f"{name} {', '.join(paths_of(line))}{suffix}")
    return launches


def add_enter(trace: TraceCtx, phase: str, facts: Facts) -> TraceCtx:
    """Insert a line before the first launch of a phase, with the phase's name and the digest of its launches::

        zero_enter('backward', '1f0c5a9e')
        t5 = zero_all_gather(t_h_0_w, 'h.0.w')

    Ranks compare name and digest, so that they cannot mix up messages. A phase without launches gets no line: another
    rank may run no such phase.
    """
    executor = facts.executor
    index = next((index for index, line in enumerate(trace.bound_symbols) if line.sym.name in executor.launches), None)
    if index is None:
        return trace
    launches = launches_of(trace, executor)
    digest = hashlib.sha256("\n".join(launches).encode()).hexdigest()[:8]
    executor.runtime.note_launches(digest, launches)
    new = from_trace(trace)
    with tracectx(new):
        line = executor.enter.bind(facts.named(phase), digest, output=None)
    new.bound_symbols = [*trace.bound_symbols[:index], line, *trace.bound_symbols[index:]]
    new.set_provenance(TraceProvenance("Name the phase (thunder_zero)"))
    return new


def require_own_lines(before: TraceCtx, after: TraceCtx, executor: ZeroExecutor, transform: str) -> None:
    """Raise ScheduleError if a transform of a finished trace changed, dropped or moved one of our lines.

    The ``del`` of a gathered parameter is one of our lines, too, since it says when memory is freed.
    """
    if not isinstance(after, TraceCtx):
        raise ScheduleError(f"{transform} returned a {type(after).__name__}; return the trace that it was given")
    for line, other in zip_longest(_own_lines(before, executor), _own_lines(after, executor), fillvalue=""):
        if line != other:
            raise ScheduleError(
                f"{transform} changed, moved or dropped a line of the schedule, which was proved: "
                f"{(line or other)[:SHOWN]}; leave lines of thunder_zero, and the del of what they gather, in place "
                f"and in order"
            )


def _own_lines(trace: TraceCtx, executor: ZeroExecutor) -> Iterator[str]:
    gathered: set[str] = set()
    handles: set[str] = set()
    for line in trace.bound_symbols:
        written = {proxy.name for proxy in line.flat_proxy_outs}
        if line.sym.id is prims.PrimIDs.DEL:
            yield from (f"del {proxy.name}" for proxy in line.flat_proxy_args if proxy.name in gathered)
        elif line.sym.executor is executor:
            if executor.launches.get(line.sym.name) is executor.all_gather:
                handles |= written
            elif not handles.isdisjoint(proxy.name for proxy in line.flat_proxy_args):
                gathered |= written
                handles |= written
            yield line.python(indent=0)[0].partition("  # ")[0]

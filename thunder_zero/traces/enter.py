"""Puts the line into each half that says where the rank is, before the first launch."""

from __future__ import annotations

import hashlib

from thunder_zero.schedule.names import ProgramName
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

HEX_DIGITS = 8


def launches_of(trace: TraceCtx, executor: ZeroExecutor) -> list[str]:
    """What a half sends, in order, such as ``all_gather h.0.w, h.0.b``. Frees and waits are a rank's own matter: the
    shapes of its inputs may decide what it computes again."""
    lines = []
    for bsym in trace.bound_symbols:
        if (single := executor.launches.get(bsym.sym.name)) is not None:
            paths = bsym.args[1]
            what = single.name.removeprefix("zero_")
            lines.append(f"{what} {paths if isinstance(paths, str) else ', '.join(paths)}")
    return lines


def with_enter(trace: TraceCtx, program: ProgramName, executor: ZeroExecutor) -> TraceCtx:
    """The trace of a half, with its name and the digest of its launches before the first of them::

        zero_enter('backward', '1f0c5a9e')
        t5 = zero_all_gather(t_h_0_w, 'h.0.w')

    Ranks whose halves differ in either would take one message for another. A half without launches gets no line.
    """
    at = next((at for at, bsym in enumerate(trace.bound_symbols) if bsym.sym.name in executor.launches), None)
    if at is None:
        return trace
    digest = hashlib.sha256("\n".join(launches_of(trace, executor)).encode()).hexdigest()[:HEX_DIGITS]
    new = from_trace(trace)
    with tracectx(new):
        line = executor.enter.bind(str(program), digest, output=None)
    new.bound_symbols = [*trace.bound_symbols[:at], line, *trace.bound_symbols[at:]]
    new.set_provenance(TraceProvenance("Name the half (thunder_zero)"))
    return new

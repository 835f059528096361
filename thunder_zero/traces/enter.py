"""Puts the line into each half that says where the rank is, before the first launch."""

from __future__ import annotations

import hashlib

from thunder_zero.schedule.names import ProgramName
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx

HEX_DIGITS = 8


def with_enter(trace: TraceCtx, program: ProgramName, executor: ZeroExecutor) -> TraceCtx:
    """The trace of a half, with its name and the digest of its launches before the first of them::

        zero_enter('backward', '1f0c5a9e')
        t5 = zero_all_gather(t_h_0_w, 'h.0.w')

    Ranks whose halves differ in either would take one message for another. A half without launches gets no line.
    """
    at = [position for position, bsym in enumerate(trace.bound_symbols) if bsym.sym.name in executor.launches]
    if not at:
        return trace
    launches = [(trace.bound_symbols[position].sym.name, trace.bound_symbols[position].args[1]) for position in at]
    digest = hashlib.sha256(repr(launches).encode()).hexdigest()[:HEX_DIGITS]
    new = from_trace(trace)
    with tracectx(new):
        line = executor.enter.bind(str(program), digest, output=None)
    new.bound_symbols = [*trace.bound_symbols[: at[0]], line, *trace.bound_symbols[at[0] :]]
    new.set_provenance(TraceProvenance("Name the half (thunder_zero)"))
    return new

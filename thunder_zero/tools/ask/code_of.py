"""Finds the Python statement of an operation in the trace that it comes from."""

from __future__ import annotations

from collections.abc import Iterable

from thunder_zero.compiled import Traces
from thunder_zero.schedule.timeline import Op

from thunder.core.trace import tracectx


def code_of(ops: Iterable[Op], traces: Traces) -> list[str]:
    """The statement of each operation, each on one line, without the comment that has its shape."""
    found = []
    for op in ops:
        trace = traces.backward if op.backward else traces.forward
        if trace is None:
            raise ValueError("the timeline has a backward half, and the traces have none")
        with tracectx(trace):
            lines = trace.bound_symbols[op.source[0]].python(indent=0, print_depth=1)
        code = [line.partition("  #")[0].strip() for line in lines if not line.lstrip().startswith("#")]
        found.append(" ".join(code))
    return found

"""needed while: a fuser's pass rematerialises by dtypes alone.

Thunder weighs a tensor by its dtype, so forward may save more bytes than were scheduled (``repair_fusion.py``: backward
may also read what forward gathered). :class:`thunder_zero.traces.executors.RepairFusion` answers both.
"""

from __future__ import annotations

from types import FunctionType

from thunder.core.trace import TraceCtx
from thunder.extend import FusionExecutor


def fused_only(fuser: FusionExecutor, trace: TraceCtx) -> TraceCtx:
    """The trace after a fuser's pass, without Thunder's rematerialisation, which such a pass calls by this name. Runs
    the pass's code with other globals: a patch of its module would change other models too."""
    code = type(fuser).fusion_pass
    if "rematerialize" not in code.__globals__:  # a fuser that does not rematerialise
        return fuser.fusion_pass(trace)
    names = {**code.__globals__, "rematerialize": lambda trace: trace}
    only = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    fused: TraceCtx = only(fuser, trace)
    return fused

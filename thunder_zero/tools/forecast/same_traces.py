"""Refuses a forecast of memory that is of other traces."""

from __future__ import annotations

from dataclasses import replace

from thunder_zero.compiled import Traces
from thunder_zero.plan import Plan
from thunder_zero.policy import STAGES
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.replay import NOT_RUN

from thunder.core.trace import TraceCtx, tracectx


def plan_of(traces: Traces) -> Plan:
    """The plan, without the function that found its units, which often cannot be pickled."""
    return replace(traces.plan, policy=replace(traces.plan.policy, unit_of=None))


def require_of(memory: Memory, traces: Traces) -> None:
    """Refuse what is no forecast of these traces.

    Raises:
        TypeError: it is no forecast.
        ValueError: it is one of other traces.
    """
    action = "give what thunder_zero.tools.memory returns for these traces"
    if not isinstance(memory, Memory):
        raise TypeError(f"memory is of type {type(memory).__name__}; {action}")
    if memory.plan != plan_of(traces):
        theirs, ours = (
            f"rank {plan.rank} of {plan.world_size} in {STAGES[plan.policy.stage].name}"
            for plan in (memory.plan, traces.plan)
        )
        ours = ours if ours != theirs else "the same rank with another module or policy"
        raise ValueError(f"memory is a forecast of {theirs}, the traces are of {ours}; {action}")
    forecast = {(line.half, line.position): line.code for line in memory.lines if line.position >= 0}
    here = _codes("forward", traces.forward) | (_codes("backward", traces.backward) if traces.backward else {})
    for half, position in sorted(forecast.keys() | here.keys()):
        pair = (forecast.get((half, position), "missing"), here.get((half, position), "missing"))
        there, line = (code.partition("\n")[0] for code in pair)
        if there != line:
            raise ValueError(
                f"memory is a forecast of other traces, where line {position} of {half} is {there!r}, not {line!r}; "
                f"{action}"
            )


def _codes(half: str, trace: TraceCtx) -> dict[tuple[str, int], str]:
    """The lines that a forecast runs."""
    with tracectx(trace):
        return {
            (half, position): "\n".join(line.python(indent=0, print_depth=1))
            for position, line in enumerate(trace.bound_symbols[:-1])
            if line.sym.id not in NOT_RUN
        }

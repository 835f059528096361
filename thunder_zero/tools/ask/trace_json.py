"""The rows of traces as data for JSON."""

from __future__ import annotations

from typing import Any

from thunder_zero.compiled import Traces
from thunder_zero.tools.ask.print_trace import rows_of
from thunder_zero.tools.forecast.memory import memory
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.report.line_meanings import HALVES, Gap, Row, select


def json_of(traces: Traces, half: str = "both", *, unit: str | None = None, fold: bool = False) -> dict[str, Any]:
    """What :func:`thunder_zero.tools.print_trace` prints, as numbers and strings; sizes in bytes.

    Raises:
        ValueError: there is no such unit.
    """
    plan = traces.plan
    try:
        forecast = memory(traces)
    except NoForecast:
        forecast = None
    shown = {name: select(rows_of(traces, name, forecast), plan, unit, only_parameters=fold) for name in HALVES[half]}
    return {
        "stage": plan.policy.stage,
        "rank": plan.rank,
        "world_size": plan.world_size,
        "replicas": plan.replicas,
        "units": list(plan.units),
        "lines": [_line(name, row) for name, rows in shown.items() for row in rows],
    }


def _line(half: str, row: Row | Gap) -> dict[str, Any]:
    if isinstance(row, Gap):
        return {"half": half, "lines_left_out": row.lines}
    return {
        "half": half,
        "position": row.line.position,
        "code": row.line.code,
        "origin": row.line.origin,
        "kind": None if row.kind is None else str(row.kind),
        "parameters": list(row.params),
        "of_gradients": row.gradients,
        "sent": row.sent,
        "deferred": row.deferred,
        "gathered": row.gathered,
        "alive": row.line.alive,
        "peak": row.line.peak,
    }

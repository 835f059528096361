"""``tz.tools.diff``: compares two programs of a module unit by unit, such as ZeRO-2 with ZeRO-3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from thunder_zero.plan.amounts import name_of
from thunder_zero.plan.params import ROOT, Param, Plan
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Compute, Gather, Launch, Reduce, starts_collective
from thunder_zero.schedule.passes import run
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.units import backward_ends
from thunder_zero.tools.forecast.memory import memory
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.views.difference import Difference, Figures
from thunder_zero.traces.compiled import Traces

Units = dict[str, tuple[Figures, Figures]]


def diff(first: Traces, second: Traces) -> Difference:
    """Return the differences between two programs of a module, unit by unit. The result prints as a table.

    >>> zero2, zero3 = (tz.trace(model, tokens, policy=stage, world_size=8) for stage in (2, 3))
    >>> print(tz.tools.diff(zero2, zero3))

    Args:
        first, second: results of :func:`thunder_zero.trace` or :func:`thunder_zero.traces_of` for one module.

    Returns:
        Figures of each unit and of all units: gathers, reductions, bytes sent, the most gathered bytes, and recomputed
        operations. The result also has the forecast peak of memory, without a loss and an optimizer.

    Raises:
        TypeError: an argument is not a ``Traces``.
        ValueError: the modules differ in a parameter or in their units, or only one program is for ``no_sync``.
    """
    units, total = compare_units(first, second)
    try:
        forecasts = [memory(traces) for traces in (first, second)]
    except NoForecast:
        forecasts = []
    return Difference(
        plans=(first.plan, second.plan),
        units=units,
        total=total,
        peaks=(forecasts[0].peak, forecasts[1].peak) if forecasts else None,
        at_rest=(forecasts[0].at_rest, forecasts[1].at_rest) if forecasts else None,
    )


def compare_units(first: Traces, second: Traces) -> tuple[Units, tuple[Figures, Figures]]:
    """Return both programs' figures keyed by unit, and both programs' totals. Raise the errors of ``diff``."""
    for traces in (first, second):
        if not isinstance(traces, Traces):
            raise TypeError(f"diff takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    _require_one_module(first, second)
    figures = [_figures_by_unit(traces) for traces in (first, second)]
    units = {unit: (figures[0][unit], figures[1][unit]) for unit in first.plan.units}
    return units, (figures[0][None], figures[1][None])


def _require_one_module(first: Traces, second: Traces) -> None:
    if first.facts.synced is not second.facts.synced:
        raise ValueError("one of the programs runs under no_sync and the other does not; compare programs of one kind")
    for param, other in zip_longest(first.plan.params, second.plan.params):
        if param is None or other is None or _identity(param, first.plan) != _identity(other, second.plan):
            raise ValueError(
                f"the traces are of different modules, or ignore different parameters: the first has "
                f"{_described(param, first.plan)} where the second has {_described(other, second.plan)}; "
                f"trace one module twice"
            )
        if param.unit != other.unit:
            raise ValueError(
                f"the traces divide the module differently: {param.path!r} is of unit {param.unit!r} in the first and "
                f"of {other.unit!r} in the second; give both the same Policy.unit_of"
            )


def _identity(param: Param, plan: Plan) -> tuple[object, ...]:
    return param.path, plan.whole_shape(param), param.dtype, param.requires_grad


def _described(param: Param | None, plan: Plan) -> str:
    if param is None:
        return "no further parameter"
    frozen = "" if param.requires_grad else ", frozen"
    return f"{param.path!r} {plan.whole_shape(param)} {name_of(param.dtype)}{frozen}"


def _figures_by_unit(traces: Traces) -> dict[str | None, Figures]:
    """Return a mapping from units to figures. The key None has the totals."""
    recomputed = _recomputed_ops(run(traces.lifted))
    return {unit: _figures(traces.timeline, recomputed, unit) for unit in (*traces.plan.units, None)}


def _figures(timeline: Timeline, recomputed: Sequence[tuple[Compute, str]], unit: str | None) -> Figures:
    launches = [op for op in timeline.ops if isinstance(op, Launch) and unit in (None, timeline.params_of(op)[0].unit)]
    gathers, reductions = (
        [timeline.traffic(op).sent for op in launches if isinstance(op, kind)] for kind in (Gather, Reduce)
    )
    recomputed_in_unit = [op for op, unit_of_op in recomputed if unit in (None, unit_of_op)]
    others = (op for op in timeline.ops if starts_collective(op) and not isinstance(op, Launch))
    slices = [timeline.traffic(op).sent for op in others if unit is None]
    return Figures(
        gathers=len(gathers),
        reductions=len(reductions),
        gather_bytes=sum(gathers),
        reduce_bytes=sum(reductions),
        slices=len(slices),
        slice_bytes=sum(slices),
        gathered_at_most=max(gathered_bytes(timeline, unit), default=0),
        recomputed=len(recomputed_in_unit),
        recomputed_flops=sum(op.flops for op in recomputed_in_unit),
    )


def _recomputed_ops(timeline: Timeline) -> list[tuple[Compute, str]]:
    """Return (operation, unit) pairs. The operation recomputes a forward value in the unit's backward.

    Operations that read only parameters are left out. ``timeline`` must be scheduled, but not fused: fusers merge
    operations.
    """
    ends = backward_ends(timeline).items()
    return [
        # the next unit whose gradients are complete
        (op, next((unit for unit, end in ends if end >= index), ROOT))
        for index, op in enumerate(timeline.ops)
        if isinstance(op, Compute) and timeline.recomputes(op)
    ]

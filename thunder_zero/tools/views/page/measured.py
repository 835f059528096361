"""Puts the measured times of ``measure_times`` into the forecast of a step.

The lines between two waits for gathers share their measured time in the forecast's proportions. Waits of torch's tensor
parallelism are not measured, and also get a share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import isfinite

from thunder_zero.plan.policy import Times
from thunder_zero.schedule.ops import Compute, Gather, Op, ends
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.time.estimate import Estimate


def by_times(forecast: Estimate, times: Times) -> Estimate:
    """Return the estimate with measured seconds between waits for gathers, and with the measured gather speed.

    Lines before the first wait or after the last wait of a phase are not measured. The mean factor of the measured
    lines scales these lines. Measured compute includes load, launch and finish, so they become 0.
    """
    ops = forecast.timeline.ops
    costs = [replace(cost, load=0.0, launch_seconds=0.0, finish_seconds=0.0) for cost in forecast.costs]
    busy = _busy_seconds(replace(forecast, costs=tuple(costs)))
    factors: dict[int, float] = {}
    for stretch, seconds in _stretches(forecast.timeline, times):
        if total := sum(busy[index] for index in stretch):
            factors |= dict.fromkeys(stretch, seconds / total)
    expected = sum(busy[index] for index in factors)
    mean = sum(busy[index] * factor for index, factor in factors.items()) / expected if expected else 1.0
    wire_factor = _wire_factor(forecast, times)
    for index, cost in enumerate(costs):
        factor = factors.get(index, mean)
        wire = cost.wire_seconds * (factor if _is_exchange(ops[index]) else wire_factor)
        costs[index] = replace(cost, seconds=cost.seconds * factor, wire_seconds=wire)
    return replace(forecast, costs=tuple(costs))


def _is_exchange(op: Op) -> bool:
    """Return whether an operation is a collective of torch's tensor parallelism, or the wait for one."""
    return isinstance(op, Compute) and op.between_slices


def _busy_seconds(forecast: Estimate) -> list[float]:
    """Return each operation's seconds of compute, or of waiting for torch's tensor parallelism."""
    ops, busy = forecast.timeline.ops, [cost.seconds for cost in forecast.costs]
    for span in forecast.spans:
        if span.waits and _is_exchange(ops[span.op]):
            busy[span.op] += span.seconds
    return busy


def _stretches(timeline: Timeline, times: Times) -> Iterator[tuple[range, float]]:
    """Yield (range of operations, measured seconds) pairs, from each wait for a gather to the next."""
    waits = [index for index, op in enumerate(timeline.ops) if ends(op, Gather)]
    for wait, following in pairwise(waits):
        op = timeline.ops[wait]
        seconds = (times.backward if op.backward else times.forward).get(op.params[0])
        if seconds is not None and timeline.ops[following].backward is op.backward:
            yield range(wait + 1, following), seconds


def _wire_factor(forecast: Estimate, times: Times) -> float:
    """Return the measured seconds of gathers, divided by the forecast seconds."""
    gathers = [index for index, op in enumerate(forecast.timeline.ops) if isinstance(op, Gather)]
    nbytes = sum(forecast.timeline.traffic(forecast.timeline.ops[index]).busiest for index in gathers)
    seconds = sum(forecast.costs[index].wire_seconds for index in gathers)
    return nbytes / times.bytes_per_second / seconds if seconds and isfinite(times.bytes_per_second) else 1.0

"""Puts measured times, from ``measure_times`` or a profile of a step, into an estimate.

In: the forecast of a step, and measured times. Out: an estimate with the measured times. The lines between two measured
moments share the measured time in the forecast's proportions. Waits of torch's tensor parallelism are not measured, and
also get a share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from typing import Any

from thunder_zero.plan.policy import Times
from thunder_zero.schedule.names import label_of
from thunder_zero.schedule.ops import (
    Compute,
    Gather,
    Launch,
    Op,
    Return,
    Wait,
    ends,
    ends_collective,
    starts_collective,
)
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Cost, Lane
from thunder_zero.tools.time.estimate import Estimate
from thunder_zero.tools.time.lanes import Span

MICRO = 1e6  # a profile's unit of time is a microsecond


def by_times(forecast: Estimate, times: Times) -> Estimate:
    """Return the estimate with measured seconds between waits for gathers, and with the measured gather speed.

    Lines before the first wait or after the last wait of a phase are not measured. The mean factor of the measured
    lines scales these lines.
    """
    ops, costs = forecast.timeline.ops, [_scaled(cost, 1.0, 1.0) for cost in forecast.costs]
    seconds_of = _busy_seconds(replace(forecast, costs=tuple(costs)))
    factors: list[float | None] = [None] * len(ops)
    for stretch, seconds in _stretches(forecast.timeline, times):
        total = sum(seconds_of[index] for index in stretch)
        factors[stretch.start : stretch.stop] = [seconds / total if total else None] * len(stretch)
    known = (index for index, factor in enumerate(factors) if factor is not None)
    measured = [index for index in known if isinstance(ops[index], Compute)]
    expected = sum(seconds_of[index] for index in measured)
    mean = sum(seconds_of[index] * (factors[index] or 0.0) for index in measured) / expected if expected else 1.0
    wire_factor = _wire_factor(forecast, times)
    for index, cost in enumerate(costs):
        factor = mean if (own := factors[index]) is None else own
        costs[index] = _scaled(cost, factor, factor if _is_exchange(ops[index]) else wire_factor)
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


def _scaled(cost: Cost, compute: float, wire: float) -> Cost:
    """Return a cost with scaled seconds. Measured compute includes load, launch and finish, so they become 0."""
    seconds, wire_seconds = cost.seconds * compute, cost.wire_seconds * wire
    return replace(cost, seconds=seconds, wire_seconds=wire_seconds, load=0.0, launch_seconds=0.0, finish_seconds=0.0)


def by_profile(forecast: Estimate, events: Sequence[Mapping[str, Any]]) -> Estimate:
    """Return the estimate with the host's times, from the last whole step of a profile.

    A collective is in flight from its launch to the end of its wait. ``forecast`` has neither loss nor optimizer. Of
    the events, in Chrome's format, only those with labels of this package are used.
    """
    ops = forecast.timeline.ops
    marked = [index for index, op in enumerate(ops) if isinstance(op, Launch | Wait)]
    names = [label_of(ops[index], forecast.timeline) for index in marked]
    labels = set(names)
    ours = sorted(
        (event for event in events if event.get("name") in labels and event.get("cat") in (None, "user_annotation")),
        key=lambda event: float(event["ts"]),
    )
    seen = [event["name"] for event in ours]
    starts = [start for start in range(len(seen) - len(names), -1, -1) if seen[start : start + len(names)] == names]
    if not names or not starts:
        missing = sorted(labels - set(seen))
        problem = f"it lacks {missing[0]!r}" if missing else "their order is another one"
        raise ValueError(
            f"the profile has no whole step of this program: of {len(names)} launches and waits it has {len(seen)}, "
            f"and {problem}; profile forward and backward of the program whose traces you give"
        )
    step = dict(zip(marked, ours[starts[0] : starts[0] + len(names)], strict=True))
    return replace(
        forecast, measured=tuple(_placed(forecast, {index: _interval(event) for index, event in step.items()}))
    )


def _interval(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"]) / MICRO
    return start, start + float(event.get("dur", 0.0)) / MICRO


def _placed(forecast: Estimate, measured: Mapping[int, tuple[float, float]]) -> Iterator[Span]:
    """Yield spans: launches and waits at measured times, and compute, scaled to fill the time between."""
    timeline, costs, busy = forecast.timeline, forecast.costs, _busy_seconds(forecast)
    bounds = [*measured, len(timeline.ops)]
    first, mean = bounds[0], _mean_factor(busy, measured)
    zero = measured[first][0] - sum(busy[:first]) * mean
    now, launched = 0.0, dict[int, float]()  # start times of tensor-parallel collectives in flight
    for begin, stop in pairwise([-1, *bounds]):
        computing = [index for index in range(begin + 1, stop) if isinstance(timeline.ops[index], Compute | Return)]
        total = sum(busy[index] for index in computing)
        until = measured[stop][0] - zero if stop in measured else now + total * mean
        factor = (until - now) / total if total else 0.0
        for index in computing:
            op = timeline.ops[index]
            if starts_collective(op):
                launched[index] = now
            start, now = now, now + busy[index] * factor
            if busy[index] or not _is_exchange(op):
                yield Span(index, Lane.COMPUTE, start, now, waits=Lane.TENSOR if _is_exchange(op) else None)
            if ends_collective(op) and (launch := timeline.writer[op.reads[0]]) in launched:
                yield Span(launch, Lane.TENSOR, launched.pop(launch), now)
        if stop in measured:
            start, end = (moment - zero for moment in measured[stop])
            op = timeline.ops[stop]
            launch = timeline.writer[op.reads[0]] if isinstance(op, Wait) else stop
            waits = costs[launch].lane or Lane.SHARD if isinstance(op, Wait) else None
            yield Span(stop, Lane.COMPUTE, start, end, waits=waits)
            if waits:
                yield Span(launch, waits, measured[launch][0] - zero, end)
            now = end


def _mean_factor(busy: Sequence[float], measured: Mapping[int, tuple[float, float]]) -> float:
    """Return the measured seconds between measured moments, divided by the forecast seconds."""
    marked = list(measured)
    between = sum(measured[next_mark][0] - measured[mark][1] for mark, next_mark in pairwise(marked))
    seconds = sum(busy[marked[0] : marked[-1]])
    return between / seconds if seconds else 1.0

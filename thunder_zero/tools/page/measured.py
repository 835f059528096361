"""When operations run by measurements: the times of ``measure_times``, or a profile of a step.

In: the forecast of a step, and what was measured between the waits of its collectives. Out: an estimate with these
times. Lines between two measured moments share the time between them as they do in the forecast; so do waits for
collectives of torch's tensor parallelism, which nobody measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite
from typing import Any

from thunder_zero.plan.policy import Times
from thunder_zero.schedule.names import label_of
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline
from thunder_zero.tools.cost.costs import Cost, Lane
from thunder_zero.tools.cost.estimate import Estimate
from thunder_zero.tools.cost.lanes import Span

MICRO = 1e6  # a profile's unit of time is a microsecond


def by_times(forecast: Estimate, times: Times) -> Estimate:
    """The step with measured seconds of compute between the waits of gathers, and the measured speed of gathers. What
    has no measurement (before the first wait of a phase, after the last, reductions) is as much slower than the
    forecast, or faster, as what has one."""
    ops, costs = forecast.timeline.ops, [_scaled(cost, 1.0, 1.0) for cost in forecast.costs]
    held = _held(replace(forecast, costs=tuple(costs)))
    factors: list[float | None] = [None] * len(ops)
    for stretch, seconds in _stretches(forecast.timeline, times):
        total = sum(held[at] for at in stretch)
        factors[stretch.start : stretch.stop] = [seconds / total if total else None] * len(stretch)
    known = [at for at, factor in enumerate(factors) if factor is not None and ops[at].kind is Kind.COMPUTE]
    before = sum(held[at] for at in known)
    usual = sum(held[at] * (factors[at] or 0.0) for at in known) / before if before else 1.0
    slower = _slower_wires(forecast, times)
    for at, cost in enumerate(costs):
        factor = usual if (own := factors[at]) is None else own
        costs[at] = _scaled(cost, factor, factor if ops[at].is_torchs else slower)
    return replace(forecast, costs=tuple(costs))


def _held(forecast: Estimate) -> list[float]:
    """Return for how long each operation computes, or waits for a collective of torch's tensor parallelism."""
    ops, found = forecast.timeline.ops, [cost.seconds for cost in forecast.costs]
    for span in forecast.spans:
        if span.waits and ops[span.op].is_torchs:
            found[span.op] += span.seconds
    return found


def _stretches(timeline: Timeline, times: Times) -> Iterator[tuple[range, float]]:
    """The operations after the wait of each gather up to that of the next one in its phase, with the seconds."""
    waits = [at for at, op in enumerate(timeline.ops) if timeline.ends(op, Kind.GATHER)]
    for at, following in pairwise(waits):
        op = timeline.ops[at]
        seconds = (times.backward if op.backward else times.forward).get(op.params[0])
        if seconds is not None and timeline.ops[following].backward is op.backward:
            yield range(at + 1, following), seconds


def _slower_wires(forecast: Estimate, times: Times) -> float:
    """How much longer gathers take than in the forecast."""
    gathers = [at for at, op in enumerate(forecast.timeline.ops) if op.kind is Kind.GATHER]
    nbytes = sum(forecast.timeline.wire_bytes(forecast.timeline.ops[at]) for at in gathers)
    seconds = sum(wire[1] for at in gathers if (wire := forecast.costs[at].wire))
    return nbytes / times.bytes_per_second / seconds if seconds and isfinite(times.bytes_per_second) else 1.0


def _scaled(cost: Cost, compute: float, wire: float) -> Cost:
    """What else holds compute up is part of what was measured."""
    scaled = cost.wire and (cost.wire[0], cost.wire[1] * wire)
    return replace(cost, seconds=cost.seconds * compute, wire=scaled, load=0.0, launch_seconds=0.0, finish_seconds=0.0)


def by_profile(forecast: Estimate, events: Sequence[Mapping[str, Any]]) -> Estimate:
    """The last whole step of a profile, as the host saw it: a collective is in flight from its launch to the end of its
    wait. Chrome's ``events`` with our labels count; the forecast has no loss and no optimizer."""
    ops = forecast.timeline.ops
    marked = [at for at, op in enumerate(ops) if op.kind in LAUNCHES or op.kind is Kind.WAIT]
    names = [label_of(ops[at], forecast.timeline) for at in marked]
    known = set(names)
    found = sorted(
        (event for event in events if event.get("name") in known and event.get("cat") in (None, "user_annotation")),
        key=lambda event: float(event["ts"]),
    )
    seen = [event["name"] for event in found]
    starts = [at for at in range(len(seen) - len(names), -1, -1) if seen[at : at + len(names)] == names]
    if not names or not starts:
        missing = sorted(known - set(seen))
        lacks = f"it lacks {missing[0]!r}" if missing else "their order is another one"
        raise ValueError(
            f"the profile has no whole step of this program: of {len(names)} launches and waits it has {len(seen)}, "
            f"and {lacks}; profile forward and backward of the program whose traces you give"
        )
    step = dict(zip(marked, found[starts[0] : starts[0] + len(names)], strict=True))
    return replace(forecast, measured=tuple(_placed(forecast, {at: _moments(event) for at, event in step.items()})))


def _moments(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"]) / MICRO
    return start, start + float(event.get("dur", 0.0)) / MICRO


def _placed(forecast: Estimate, moments: Mapping[int, tuple[float, float]]) -> Iterator[Span]:
    """Waits and launches where they were measured; computations between them share the time."""
    timeline, costs, held = forecast.timeline, forecast.costs, _held(forecast)
    bounds = [*moments, len(timeline.ops)]
    first, speed = bounds[0], _usual(held, moments)
    zero = moments[first][0] - sum(held[:first]) * speed
    now, launched = 0.0, dict[int, float]()  # collectives of tensor parallelism, until their wait
    for begin, stop in pairwise([-1, *bounds]):
        computing = [at for at in range(begin + 1, stop) if timeline.ops[at].kind is Kind.COMPUTE]
        total = sum(held[at] for at in computing)
        until = moments[stop][0] - zero if stop in moments else now + total * speed
        factor = (until - now) / total if total else 0.0
        for at in computing:
            op = timeline.ops[at]
            if op.is_torchs and op.launches:
                launched[at] = now
            start, now = now, now + held[at] * factor
            if held[at] or not op.is_torchs:
                yield Span(at, Lane.COMPUTE, start, now, None, op.is_torchs)
            if op.is_torchs and op.waits and (launch := timeline.writer[op.reads[0]]) in launched:
                yield Span(launch, Lane.TENSOR, launched.pop(launch), now)
        if stop in moments:
            start, end = (moment - zero for moment in moments[stop])
            op = timeline.ops[stop]
            yield Span(stop, Lane.COMPUTE, start, end, None, op.kind is Kind.WAIT)
            if op.kind is Kind.WAIT:
                launch = timeline.writer[op.reads[0]]
                lane = wire[0] if (wire := costs[launch].wire) else Lane.SHARD
                yield Span(launch, lane, moments[launch][0] - zero, end)
            now = end


def _usual(held: Sequence[float], moments: Mapping[int, tuple[float, float]]) -> float:
    """How much longer lines take between measured moments than in the forecast."""
    marked = list(moments)
    between = sum(moments[after][0] - moments[at][1] for at, after in pairwise(marked))
    seconds = sum(held[marked[0] : marked[-1]])
    return between / seconds if seconds else 1.0

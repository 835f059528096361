"""Proves that what is in flight stays within the plan's sizes: bytes, and units ahead."""

from __future__ import annotations

from collections import Counter

from thunder_zero.schedule.fault import fault
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline


def check_in_flight(timeline: Timeline) -> None:
    """Prove that gathers in flight, and reductions in flight, stay within the bounds. A single one may exceed them, and
    so may one that is waited for immediately.

    Raises:
        ScheduleError: the first rule that does not hold.
    """
    _check_ahead(timeline)
    bound = timeline.plan.sizes.in_flight_bytes
    under_way: Counter[Kind] = Counter()
    launches: Counter[Kind] = Counter()
    for at, op in enumerate(timeline.ops):
        if op.kind in LAUNCHES:
            size = timeline.full_bytes(op)
            under_way[op.kind] += size
            launches[op.kind] += size > 0
            is_awaited = timeline.ops[at + 1].reads == op.writes
            if not is_awaited and size > 0 and launches[op.kind] > 1 and under_way[op.kind] > bound:
                raise fault(timeline, at, f"puts {under_way[op.kind]} bytes in flight; in_flight_bytes is {bound}")
        elif op.kind is Kind.WAIT:
            kind = timeline.launches[op.reads[0]].kind
            under_way[kind] -= timeline.full_bytes(op)
            launches[kind] -= timeline.full_bytes(op) > 0


def _check_ahead(timeline: Timeline) -> None:
    """No more units are gathered ahead than ``Sizes.prefetch`` says, one at least; what is waited for immediately does
    not count. A unit is ahead until the first of its gathers has ended."""
    if timeline.plan.policy.times is not None:
        return
    prefetch = timeline.plan.sizes.prefetch
    computes = None  # the unit of the latest wait
    ahead: Counter[str] = Counter()  # gathers in flight
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.GATHER and timeline.full_bytes(op):
            ahead[timeline.params_of(op)[0].unit] += 1
            units = [unit for unit in +ahead if unit != computes]
            if len(units) > max(prefetch, 1) and timeline.ops[at + 1].reads != op.writes:
                raise fault(timeline, at, f"gathers {len(units)} units ahead; prefetch is {prefetch}")
        elif timeline.ends(op, Kind.GATHER) and timeline.full_bytes(op):
            computes = timeline.params_of(op)[0].unit
            ahead[computes] -= 1


def check_making(timeline: Timeline) -> None:
    """Prove that full gradients in flight, and those that are being made for the next reductions, stay within the
    bound, unless nothing is in flight while they are made. Holds before fusion only: a fuser makes several gradients
    at once.

    Raises:
        ScheduleError: the first rule that does not hold.
    """
    bound = timeline.plan.sizes.in_flight_bytes
    written = {name: at for at, op in enumerate(timeline.ops) for name in op.writes}
    begun: Counter[int] = Counter()
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.REDUCE:
            begun[min(written.get(name, at) for name in op.reads)] += timeline.full_bytes(op)
    made = under_way = 0
    for at, op in enumerate(timeline.ops):
        made += begun[at]
        if (begun[at] or op.kind is Kind.REDUCE) and under_way and under_way + made > bound:
            raise fault(
                timeline,
                at,
                f"makes {made} bytes of gradients while {under_way} bytes are in flight; in_flight_bytes is {bound}",
            )
        if op.kind is Kind.REDUCE:
            under_way += timeline.full_bytes(op)
            made -= timeline.full_bytes(op)
        elif timeline.ends(op, Kind.REDUCE):
            under_way -= timeline.full_bytes(op)

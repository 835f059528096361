"""Proves that bytes in flight, and units gathered ahead, stay within the plan's sizes.

In: a timeline. Out: nothing, or a ScheduleError. ``verify.py`` calls :func:`check_in_flight` in each of its proofs, and
:func:`check_making` in the proof of the schedule, before fusion. Example with ``in_flight_bytes`` = 100::

    gather  a <- t_a     60 bytes
    gather  b <- t_b     60 bytes         ScheduleError: 120 bytes are in flight
    wait    w_a <- a
    wait    w_b <- b
"""

from __future__ import annotations

from collections import Counter

from thunder_zero.schedule.ops import Gather, Launch, Reduce, Wait, ends
from thunder_zero.schedule.sink_waits import gathers_ahead, making
from thunder_zero.schedule.timeline import Timeline, fault


def check_in_flight(timeline: Timeline) -> None:
    """Prove that gathers in flight, and reductions in flight, stay within the bounds. A launch may exceed its bound if
    it is alone in flight, or if its wait follows directly."""
    _check_ahead(timeline)
    bound = timeline.plan.sizes.in_flight_bytes
    in_flight: Counter[type[Launch]] = Counter()
    launches: Counter[type[Launch]] = Counter()
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Launch):
            kind, size = type(op), timeline.traffic(op).full
            in_flight[kind] += size
            launches[kind] += size > 0
            is_awaited = timeline.ops[index + 1].reads == op.writes
            if not is_awaited and size > 0 and launches[kind] > 1 and in_flight[kind] > bound:
                raise fault(timeline, index, f"puts {in_flight[kind]} bytes in flight; in_flight_bytes is {bound}")
        elif isinstance(op, Wait):
            size = timeline.traffic(op).full
            in_flight[type(op.launch)] -= size
            launches[type(op.launch)] -= size > 0


def _check_ahead(timeline: Timeline) -> None:
    """Check that at most ``Sizes.prefetch`` units, or a single unit, are gathered ahead. A unit is ahead until one of
    its gathers has ended, or until backward reads one of its parameters that forward gathered. A gather whose wait
    follows directly is not ahead."""
    if timeline.plan.policy.times is not None:
        return
    prefetch = timeline.plan.sizes.prefetch
    units_of: dict[str, tuple[str, ...]] = {}  # value that is computed from gathered parameters alone -> their units
    in_flight: Counter[str] = Counter()  # number of gathers, by unit
    begun: set[str] = set()  # units that compute, or have computed
    latest, launched = "", None
    for index, op in enumerate(timeline.ops):
        if index == timeline.backward_start:
            begun.clear()
        if isinstance(op, Gather) and timeline.traffic(op).full:
            unit, launched = timeline.params_of(op)[0].unit, index
            if not in_flight[unit] and unit != latest:
                begun.discard(unit)
            in_flight[unit] += 1
            continue
        is_end = ends(op, Gather) and timeline.traffic(op).full > 0
        units_of_reads = (unit for read in op.reads for unit in units_of.get(read, ()))
        units = dict.fromkeys([timeline.params_of(op)[0].unit] if is_end else units_of_reads)
        if launched is not None:
            is_awaited = op.reads == timeline.ops[launched].writes
            ahead = in_flight.keys() - begun - (units.keys() if is_awaited or not is_end else set())
            if len(ahead) > max(prefetch, 1):
                raise fault(timeline, launched, f"gathers {len(ahead)} units ahead; prefetch is {prefetch}")
        launched = None
        units_of |= {name: tuple(units) for name in op.writes if units and name in timeline.derived}
        for unit in units:
            latest = unit
            begun.add(unit)
            in_flight[unit] -= is_end
            if in_flight[unit] <= 0:
                del in_flight[unit]


def check_making(timeline: Timeline) -> None:
    """Prove that gradients and gathers ahead stay within ``in_flight_bytes``.

    Full gradients in flight, and gradients that are being computed, stay within the bound, unless nothing is in flight.
    The bound also limits gathers that start ahead, unless only reductions of the last ``Sizes.prefetch`` units are in
    flight. The rule holds before fusion only: a fuser computes several gradients at once.
    """
    bound = timeline.plan.sizes.in_flight_bytes
    begun = making(timeline)
    ahead = gathers_ahead(timeline)
    running: dict[str, int] = {}  # handle of a reduction in flight -> number of earlier reductions
    made_bytes = in_flight = reductions = 0
    for index, op in enumerate(timeline.ops):
        made_bytes += begun[index]
        if (begun[index] or isinstance(op, Reduce)) and in_flight and in_flight + made_bytes > bound:
            raise fault(
                timeline,
                index,
                f"makes {made_bytes} bytes of gradients while {in_flight} bytes are in flight; in_flight_bytes is "
                f"{bound}",
            )
        older, starting = ahead.get(index, (0, 0))
        if older and min(running.values(), default=older) < older and in_flight + made_bytes + starting > bound:
            raise fault(
                timeline,
                index,
                f"starts {starting} bytes ahead beside {in_flight + made_bytes} bytes of gradients, some of which were "
                f"made {timeline.plan.sizes.prefetch} units before; in_flight_bytes is {bound}",
            )
        if isinstance(op, Reduce):
            in_flight += timeline.traffic(op).full
            if not timeline.is_second_reduction(op):
                running[op.handle] = reductions
                reductions += 1
                made_bytes -= timeline.traffic(op).full
        elif ends(op, Reduce):
            running.pop(op.launch.handle, None)
            in_flight -= timeline.traffic(op).full

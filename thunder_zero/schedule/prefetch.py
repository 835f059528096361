"""Starts each gather ahead of its use.

The gathers of a phase start in the order of their waits. The first gather starts where the phase starts. Each later
gather starts right after an earlier wait, so that the computations between two waits stay one region for the fuser::

    gather a            gather a
    wait   a            wait   a
    compute ..          gather b
    gather b     -->    compute ..       prefetch=1
    wait   b            wait   b
    compute ..          gather c
    gather c            compute ..
    wait   c            wait   c
    compute ..          compute ..

``Sizes.prefetch``, or ``policy.times``, decides after which wait a gather starts. With ``prefetch=n``, the gathers of a
unit start after the first wait of the n-th unit before it. ``policy.times`` chooses the latest wait after which the
gather can still end in time, with one gather at a time on the wire::

    gather a            gather a
    wait   a            wait   a
    compute 3 s         gather b            1 s on the wire, from 0 s to 1 s after this wait
    gather b            gather c            2 s on the wire, 1 s to 3 s
    wait   b            compute 3 s
    compute 1 s  -->    wait   b
    gather c            gather d            2 s on the wire, 3 s to 5 s
    wait   c            compute 1 s
    compute 1 s         wait   c
    gather d            compute 1 s
    wait   d            wait   d

Reductions that start between two waits also use the wire, before the gather of the second wait. In backward, a
parameter that is kept unsharded counts as gathered ahead, and its first read as its wait.

A gather never starts before its shards are written, nor before its phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf

from thunder_zero.plan.params import Plan
from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.ops import Compute, Gather, Op, Reduce, Wait, ends
from thunder_zero.schedule.timeline import Timeline


def prefetch(timeline: Timeline) -> Timeline:
    """Start each gather as early as ``Sizes.prefetch`` allows, or as late as ``policy.times`` allow.

    At most ``Sizes.ahead_bytes`` are in flight. The first gather of a phase has the wire to itself: gathers that are
    needed later would only delay it.
    """
    ops = timeline.ops
    if _starts_at_use(timeline.plan):
        return timeline
    after: defaultdict[int, list[Op]] = defaultdict(list)  # index -> the gathers that start after it
    for start, stop in _phases(timeline):
        for index, op in _starts(timeline, start, stop):
            after[index].append(op)
    moved = after.pop(-1, [])
    for index, op in enumerate(ops):
        if not isinstance(op, Gather):
            moved.append(op)
        moved += after.get(index, ())
    return timeline.with_ops(moved)


@dataclass(frozen=True, slots=True)
class _Use:
    """The first use of a bucket of gathered parameters in one phase."""

    # the index after which other gathers may start. It is the index of the wait, or of the operation before the first
    # read if forward gathered the bucket
    index: int
    gather: Gather  # the launch of the bucket
    is_kept_unsharded: bool  # True if forward gathered the bucket, and backward has it from the start
    nbytes: int  # bytes on the wire for the bucket's gather and for the reductions since the previous use


class Bound(StrEnum):
    """The reason why a gather does not start earlier."""

    PHASE = "phase"  # the phase begins
    USE = "use"  # the policy starts each gather at its use
    PREFETCH = "prefetch"
    TIMES = "times"
    IN_FLIGHT = "in_flight_bytes"
    FIRST = "first"  # the first gather of a phase has the wire to itself
    EARLIER = "earlier"  # the gather before it, or the line that writes its shards


def bounds(timeline: Timeline) -> dict[str, tuple[int, Bound]]:
    """Return a mapping from handles of gathers to the index after which the gather starts, and the gather's
    :class:`Bound`. The index is that of a wait, or of the operation before the first read of a bucket that forward
    gathered. For the first gathers of a phase, it is the index before the phase."""
    ops = timeline.ops
    result: dict[str, tuple[int, Bound]] = {}
    for start, stop in _phases(timeline):
        uses = _uses(timeline, start, stop)
        for use, by_bound in zip(uses, _bounds(timeline, uses), strict=True):
            ended = max(by_bound.values())
            index = uses[ended - 1].index if ended else start - 1
            bound = next(bound for bound, count in by_bound.items() if count == ended) if ended else Bound.PHASE
            if _starts_at_use(timeline.plan):
                index, bound = use.index, Bound.USE
            elif any(isinstance(op, Compute) for op in ops[index + 1 : timeline.writer[use.gather.handle]]):
                bound = Bound.EARLIER
            if not use.is_kept_unsharded:
                result[use.gather.handle] = index, bound
    return result


def _phases(timeline: Timeline) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the start (inclusive) and the stop (exclusive) of each phase."""
    return (0, timeline.backward_start), (timeline.backward_start, len(timeline.ops))


def _starts_at_use(plan: Plan) -> bool:
    return plan.sizes.ahead_bytes == 0 or (plan.sizes.prefetch == 0 and plan.policy.times is None)


def _starts(timeline: Timeline, start: int, stop: int) -> list[tuple[int, Op]]:
    """Return (index, gather) pairs of one phase. Each gather starts right after its index."""
    uses = _uses(timeline, start, stop)
    starts: list[tuple[int, Op]] = []
    earliest = start - 1
    for use, by_bound in zip(uses, _bounds(timeline, uses), strict=True):
        if not use.is_kept_unsharded:
            ended = max(by_bound.values())
            shards = max(timeline.writer.get(read, earliest) for read in use.gather.reads)
            earliest = max(earliest, shards, uses[ended - 1].index if ended else earliest)
            starts.append((earliest, use.gather))
    return starts


def _uses(timeline: Timeline, start: int, stop: int) -> list[_Use]:
    kept_gathers = _gathered_in_forward(timeline, start)
    seen_handles: set[str] = set()
    uses: list[_Use] = []
    reduced_bytes = 0
    for index in range(start, stop):
        op = timeline.ops[index]
        for gather in [kept_gathers[read] for read in op.reads if read in kept_gathers]:
            if gather.handle not in seen_handles:
                seen_handles.add(gather.handle)
                uses.append(_Use(index - 1, gather, True, 0))
        if isinstance(op, Reduce):
            reduced_bytes += timeline.traffic(op).busiest
        elif ends(op, Gather) and isinstance(op.launch, Gather):
            uses.append(_Use(index, op.launch, False, reduced_bytes + timeline.traffic(op.launch).busiest))
            reduced_bytes = 0
    return uses


def _gathered_in_forward(timeline: Timeline, backward_start: int) -> dict[str, Gather]:
    """Return a mapping from gathered parameters, and derived values, to the gathers of forward that serve both
    phases."""
    if backward_start == 0 or not any(isinstance(op, Gather) for op in timeline.ops[backward_start:]):
        return {}
    launches = {
        name: wait.launch
        for index, name, param in timeline.gathered
        if index < backward_start and param.kept_unsharded and not param.resident
        if isinstance(wait := timeline.ops[index], Wait) and isinstance(wait.launch, Gather)
    }
    made_from = gathered_from(timeline)
    return {
        name: launches[source] for name, sources in made_from.items() for source in sources[::-1] if source in launches
    }


def _bounds(timeline: Timeline, uses: Sequence[_Use]) -> list[dict[Bound, int]]:
    """Return, for each bucket and :class:`Bound`, how many earlier buckets must be used before the bucket's gather
    starts. The largest number decides."""
    policy = timeline.plan.policy
    in_bound = ended_before([timeline.traffic(use.gather).full for use in uses], timeline.plan.sizes.ahead_bytes)
    if policy.times is None:
        units = [timeline.params_of(use.gather)[0].unit for use in uses]
        name, ahead = Bound.PREFETCH, ended_units(units, timeline.plan.sizes.prefetch)
    else:
        # A bucket that forward gathered has no wait in backward that could be timed, so its time in forward is used.
        # Backward computes longer, so the next gathers start too early rather than too late.
        phases = policy.times.forward, policy.times.backward
        computed = [phases[use.gather.backward].get(use.gather.params[0], 0.0) for use in uses]
        name = Bound.TIMES
        ahead = ended_in_time(computed, [use.nbytes / policy.times.bytes_per_second for use in uses])
    return [
        {name: ahead[index], Bound.IN_FLIGHT: in_bound[index], Bound.FIRST: min(index, 1)} for index in range(len(uses))
    ]


def ended_units(units: Sequence[str], prefetch: int) -> list[int]:
    """Return how many gathers in a sequence must have ended before each gather may start.

    The gathers of a unit start after the first gather of the unit that is ``prefetch`` units earlier.

    >>> ended_units(["a", "a", "b", "b", "c"], prefetch=1)
    [0, 0, 1, 1, 3]
    >>> ended_units(["a", "a", "b", "b", "c"], prefetch=2)
    [0, 0, 0, 0, 1]
    """
    firsts: list[int] = []
    counts: list[int] = []
    for index, unit in enumerate(units):
        if index == 0 or unit != units[index - 1]:
            firsts.append(index)
        earlier_unit = len(firsts) - 1 - prefetch
        counts.append(firsts[earlier_unit] + 1 if earlier_unit >= 0 else 0)
    return counts


def ended_before(nbytes: Sequence[int], bound: int) -> list[int]:
    """Return how many gathers in a sequence must have ended before each gather may start.

    The numbers are the smallest that keep bytes in flight within ``bound``. A single gather may exceed the bound.

    >>> ended_before([4, 4, 4, 9, 1], bound=8)
    [0, 0, 1, 3, 4]
    """
    ended, in_flight, counts = 0, 0, []
    for index, size in enumerate(nbytes):
        in_flight += size
        while in_flight > bound and ended < index:
            in_flight -= nbytes[ended]
            ended += 1
        counts.append(ended)
    return counts


def ended_in_time(computed: Sequence[float], on_wire: Sequence[float]) -> list[int]:
    """Return how many gathers in a sequence have ended at the latest start of each gather.

    A gather that starts then still ends before compute waits for it, and so do all later gathers. One gather at a time
    is on the wire. A gather starts right after a wait, or before all waits.

    Args:
        computed: seconds of compute from each gather's wait to the next wait.
        on_wire: seconds on the wire of each gather and of the reductions before it.

    >>> ended_in_time([3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0])  # waits at 0, 3, 4, 5 s; starts at -1, 2, 3, 4 s
    [0, 1, 2, 3]
    >>> ended_in_time([3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 2.0])  # starts at -1, 0, 1, 3 s
    [0, 1, 1, 2]
    """
    waits = list(accumulate(computed, initial=0.0))
    counts: list[int] = []
    start, ended = inf, len(on_wire)
    for index in reversed(range(len(on_wire))):
        start = min(waits[index], start) - on_wire[index]
        ended = min(ended, index)
        while ended and waits[ended - 1] > start:
            ended -= 1
        counts.append(ended)
    return counts[::-1]

"""When each gather starts.

The gathers of a half start in the order of their waits, the first one at the start of the half and each other right
after the wait of an earlier one, so that what is computed between two waits stays one region::

    gather a            gather a
    wait   a            wait   a
    compute ..          gather b
    gather b     -->    compute ..       prefetch=1
    wait   b            wait   b
    compute ..          gather c
    gather c            compute ..
    wait   c            wait   c
    compute ..          compute ..

Never before its shards are there, nor across the border between forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thunder_zero.timeline import Kind, Op, Timeline


def launch(timeline: Timeline) -> Timeline:
    """Starts each gather as early as ``policy.prefetch`` and ``policy.in_flight_bytes`` allow.

    The first one of a half has the wire to itself: what nobody needs yet would only delay it.
    """
    ops, policy = timeline.ops, timeline.plan.policy
    if policy.in_flight_bytes == 0 or policy.prefetch == 0:
        return timeline
    border = next((at for at, op in enumerate(ops) if op.backward), len(ops))
    after: defaultdict[int, list[Op]] = defaultdict(list)  # position -> the gathers that start after it
    for start, stop in ((0, border), (border, len(ops))):
        for at, op in _starts(timeline, start, stop):
            after[at].append(op)
    moved = after.pop(-1, [])
    for at, op in enumerate(ops):
        if op.kind is not Kind.GATHER:
            moved.append(op)
        moved += after.get(at, ())
    return timeline.with_ops(moved)


def _starts(timeline: Timeline, start: int, stop: int) -> list[tuple[int, Op]]:
    """The gathers of one half, each with the position after which it starts."""
    written: dict[str, int] = {}
    gathers: list[Op] = []
    waits: list[int] = []
    for at in range(start, stop):
        op = timeline.ops[at]
        if op.kind is Kind.GATHER:
            gathers.append(op)
        elif timeline.ends(op, Kind.GATHER):
            waits.append(at)
        written.update(dict.fromkeys(op.writes, at))
    starts: list[tuple[int, Op]] = []
    earliest = start - 1
    policy = timeline.plan.policy
    in_bytes = ended_before([timeline.full_bytes(op) for op in gathers], policy.in_flight_bytes)
    for number, (op, in_bound) in enumerate(zip(gathers, in_bytes, strict=True)):
        ended = max(in_bound, number + 1 - policy.prefetch, min(number, 1))
        shards = max(written.get(read, earliest) for read in op.reads)
        earliest = max(earliest, shards, waits[ended - 1] if ended else earliest)
        starts.append((earliest, op))
    return starts


def ended_before(nbytes: Sequence[int], bound: int) -> list[int]:
    """For each of several gathers in turn, how many of them must have ended before it may start.

    The fewest that keep the bytes under way within ``bound``; one may always be under way.

    >>> ended_before([4, 4, 4, 9, 1], bound=8)
    [0, 0, 1, 3, 4]
    """
    ended, under_way, counts = 0, 0, []
    for number, size in enumerate(nbytes):
        under_way += size
        while under_way > bound and ended < number:
            under_way -= nbytes[ended]
            ended += 1
        counts.append(ended)
    return counts

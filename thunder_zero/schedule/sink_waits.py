"""Moves the waits of reductions as late as the bytes in flight allow.

A reduction starts where its gradient is made. Its wait comes right before the return, unless the full gradients in
flight and those that are made next would exceed ``Sizes.in_flight_bytes``: then the oldest reduction must end before
the next gradient is made. If others are in flight, its wait comes right after the collective before that gradient, so
that computations between two collectives stay one region for the fuser::

    reduce a            reduce a
    wait   a            compute ..
    compute ..          reduce b         in_flight_bytes holds two
    reduce b            wait   a
    wait   b     -->    compute ..       makes the gradient of c
    compute ..          reduce c
    reduce c            wait   b
    wait   c            wait   c
    return a, b, c      return a, b, c
"""

from __future__ import annotations

from collections import deque

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline


def sink_waits(timeline: Timeline) -> Timeline:
    """Moves the waits of reductions as late as their readers and ``Sizes.in_flight_bytes`` allow."""
    bound = timeline.plan.sizes.in_flight_bytes
    last = len(timeline.ops) - 1
    making = _making(timeline)
    made = 0  # bytes of gradients that are made, or being made, and not yet launched
    pending: deque[Op] = deque()  # the waits of reductions in flight, oldest first
    number: dict[str, int] = {}  # reduced gradient -> number of reductions that end before its own
    ended = under_way = 0
    ops: list[Op] = []
    border = 0  # the place after the latest collective
    for at, op in enumerate(timeline.ops):
        if timeline.ends(op, Kind.REDUCE):
            number.update(dict.fromkeys(op.writes, ended + len(pending)))
            pending.append(op)
            continue
        made += making.get(at, 0)
        grows = at in making or op.kind is Kind.REDUCE
        due = max((number[read] for read in op.reads if read in number), default=-1)
        while pending and (at == last or ended <= due or (grows and under_way + made > bound)):
            wait = pending.popleft()
            here = border if pending and at != last and ended > due else len(ops)
            ops.insert(here, wait)
            border = here + 1
            under_way -= timeline.full_bytes(wait)
            ended += 1
        if op.kind is Kind.REDUCE:
            made -= timeline.full_bytes(op)
            under_way += timeline.full_bytes(op)
        ops.append(op)
        border = len(ops) if op.kind in (*LAUNCHES, Kind.WAIT) else border
    return timeline.with_ops(ops)


def _making(timeline: Timeline) -> dict[int, int]:
    """The position where the first gradient of each reduction is made, with the bytes of all its gradients."""
    written = {name: at for at, op in enumerate(timeline.ops) for name in op.writes}
    making: dict[int, int] = {}
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.REDUCE:
            first = min(written.get(read, at) for read in op.reads)
            making[first] = making.get(first, 0) + timeline.full_bytes(op)
    return making

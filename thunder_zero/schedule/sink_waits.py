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

Gathers that start ahead take room, too: what starts at one place and the gradients in flight stay within
``Sizes.in_flight_bytes``, as far as reductions began before the last ``Sizes.prefetch`` such places, with the compute
of as many units behind them. So with one block ahead and two in flight, three blocks are alive, not four: where a block
computes, its gradients take the room of its parameters one by one::

    reduce b                 reduce b       gradients of a and b in flight, parameters of c
    wait   c                 wait   c
    gather d                 wait   a
    wait   a         -->     gather d       gradients of b in flight, parameters of c and d
    compute ..               compute ..     makes the gradient of c
"""

from __future__ import annotations

from collections import Counter, deque

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline


def sink_waits(timeline: Timeline) -> Timeline:
    """Moves the waits of reductions as late as their readers and ``Sizes.in_flight_bytes`` allow."""
    bound = timeline.plan.sizes.in_flight_bytes
    last = len(timeline.ops) - 1
    makes, ahead = making(timeline), gathers_ahead(timeline)
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
        made += makes[at]
        grows = at in makes or op.kind is Kind.REDUCE
        due = max((number[read] for read in op.reads if read in number), default=-1)
        begun, starting = ahead.get(at, (0, 0))
        while pending and (
            at == last
            or ended <= due
            or (grows and under_way + made > bound)
            or (ended < begun and under_way + made + starting > bound)
        ):
            wait = pending.popleft()
            here = border if pending and grows and ended > due else len(ops)
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


def making(timeline: Timeline) -> Counter[int]:
    """The position where the first gradient of each reduction is made, with the bytes of all its gradients."""
    found: Counter[int] = Counter()
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.REDUCE:
            found[min(timeline.writer.get(read, at) for read in op.reads)] += timeline.full_bytes(op)
    return found


def gathers_ahead(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """For each gather: how many reductions began before the last ``Sizes.prefetch`` places where gathers start, and the
    bytes of all gathers that start at its place, up to itself. Empty if units do not bound what is ahead."""
    prefetch = timeline.plan.sizes.prefetch
    if timeline.plan.policy.times is not None or prefetch == 0:
        return {}
    begun: list[int] = []  # reductions before each place
    found: dict[int, tuple[int, int]] = {}
    reductions, starting, computed = 0, 0, True
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.GATHER:
            if computed:
                begun.append(reductions)
                starting, computed = 0, False
            starting += timeline.full_bytes(op)
            found[at] = begun[-1 - prefetch] if len(begun) > prefetch else 0, starting
        computed |= op.kind is Kind.COMPUTE
        reductions += op.kind is Kind.REDUCE
    return found

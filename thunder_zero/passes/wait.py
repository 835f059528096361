"""When each reduction must have ended.

A reduction starts where its gradient is made. Its wait comes at the end, right before the return, unless the
gradients that are still being read would exceed ``policy.in_flight_bytes``: then the oldest ends first::

    reduce a            reduce a
    wait   a            compute ..
    compute ..          reduce b         in_flight_bytes holds two
    reduce b            compute ..
    wait   b     -->    wait   a
    compute ..          reduce c
    reduce c            wait   b
    wait   c            wait   c
    return a, b, c      return a, b, c
"""

from __future__ import annotations

from collections import deque

from thunder_zero.timeline import Kind, Op, Timeline


def wait(timeline: Timeline) -> Timeline:
    """Moves the waits of reductions as far back as their readers and the bound allow."""
    bound = timeline.plan.policy.in_flight_bytes
    last = len(timeline.ops) - 1
    pending: deque[Op] = deque()  # the waits of what is under way, oldest first
    number: dict[str, int] = {}  # reduced gradient -> how many reductions end before its own
    ended = under_way = 0
    ops: list[Op] = []
    for at, op in enumerate(timeline.ops):
        if timeline.ends(op, Kind.REDUCE):
            number.update(dict.fromkeys(op.writes, ended + len(pending)))
            pending.append(op)
            continue
        size = timeline.full_bytes(op) if op.kind is Kind.REDUCE else 0
        due = max((number[read] for read in op.reads if read in number), default=-1)
        while pending and (at == last or ended <= due or (size and under_way + size > bound)):
            ops.append(pending.popleft())
            under_way -= timeline.full_bytes(ops[-1])
            ended += 1
        under_way += size
        ops.append(op)
    return timeline.with_ops(ops)

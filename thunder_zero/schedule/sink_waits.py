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

With several copies of the model, means inside of a copy are handed on, to be averaged over copies, right before the
next reduction starts::

    reduce a (shard)         reduce a (shard)
    wait   a                 compute ..
    reduce a (replicate)     wait   a
    wait   a          -->    reduce a (replicate)
    compute ..               reduce b (shard)
"""

from __future__ import annotations

from collections import Counter, deque

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline


def sink_waits(timeline: Timeline) -> Timeline:
    """Moves the waits of reductions as late as their readers and ``Sizes.in_flight_bytes`` allow."""
    sinking = _Sinking(timeline)
    for at, op in enumerate(timeline.ops):
        sinking.take(at, op)
    return timeline.with_ops(sinking.ops)


class _Sinking:
    """The operations so far, and the waits that are still to come."""

    def __init__(self, timeline: Timeline) -> None:
        self.ops: list[Op] = []
        self._timeline = timeline
        self._makes, self._ahead = making(timeline), gathers_ahead(timeline)
        self._made = 0  # bytes of gradients that are made, or being made, and not yet launched
        self._under_way = 0  # bytes of gradients and means in flight
        self._ended = 0  # reductions, without those of means
        self._pending: deque[Op] = deque()  # their waits, oldest first
        self._across: deque[Op] = deque()  # the waits of reductions of means
        self._missing: set[str] = set()  # what all these waits write
        self._border = 0  # the place after the latest collective
        waits = {op.reads[0]: op for op in timeline.ops if op.kind is Kind.WAIT}
        continued = [op for op in timeline.ops if timeline.continues(op)]
        self._next = {op.reads: (op, waits[op.writes[0]]) for op in continued}  # by the means that they read

    def take(self, at: int, op: Op) -> None:
        """Go on to the next operation."""
        if self._timeline.continues(op):
            return  # it comes with the wait for what it reads
        if self._timeline.ends(op, Kind.REDUCE):
            self._missing.update(op.writes)
            if not self._timeline.continues(self._timeline.launches[op.reads[0]]):
                self._pending.append(op)
            return
        self._made += self._makes[at]
        grows = at in self._makes or op.kind is Kind.REDUCE
        if op.kind is Kind.REDUCE:
            self._hand_on()
        self._end_before(at, op, grows=grows)
        if op.kind is Kind.REDUCE:
            self._made -= self._timeline.full_bytes(op)
            self._launch(op, len(self.ops))
        else:
            self.ops.append(op)
        self._border = len(self.ops) if op.kind in (*LAUNCHES, Kind.WAIT) else self._border

    def _hand_on(self) -> None:
        """End all reductions whose means others read."""
        while any(wait.writes in self._next for wait in self._pending):
            self._end_first(len(self.ops))

    def _end_before(self, at: int, op: Op, *, grows: bool) -> None:
        """End the reductions that must have ended where an operation starts."""
        bound = self._timeline.plan.sizes.in_flight_bytes
        begun, starting = self._ahead.get(at, (0, 0))
        is_last = at == len(self._timeline.ops) - 1
        if is_last:
            self._hand_on()
        while self._pending or self._across:
            due = is_last or not self._missing.isdisjoint(op.reads)
            room = bound - self._made - self._under_way
            if not (due or (grows and room < 0) or (self._ended < begun and room < starting)):
                return
            others = len(self._pending) + len(self._across) > 1
            self._end(self._border if others and grows and not due else len(self.ops))

    def _end(self, here: int) -> None:
        """End the oldest reduction: one of means, if any is in flight."""
        if self._across:
            self._wait(self._across.popleft(), here)
        else:
            self._end_first(here)

    def _end_first(self, here: int) -> None:
        """End the oldest reduction that reads gradients, and launch the one that reads its means, if there is one."""
        wait = self._pending.popleft()
        self._ended += 1
        self._wait(wait, here)
        if wait.writes in self._next:
            launch, last = self._next[wait.writes]
            self._across.append(last)
            self._launch(launch, self._border)
            self._border += 1

    def _wait(self, wait: Op, here: int) -> None:
        self._under_way -= self._timeline.full_bytes(wait)
        self._missing.difference_update(wait.writes)
        self.ops.insert(here, wait)
        self._border = here + 1

    def _launch(self, op: Op, here: int) -> None:
        self._under_way += self._timeline.full_bytes(op)
        self.ops.insert(here, op)


def making(timeline: Timeline) -> Counter[int]:
    """The position where the first gradient of each reduction is made, with the bytes of all its gradients."""
    found: Counter[int] = Counter()
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.REDUCE and not timeline.continues(op):
            found[min(timeline.writer.get(read, at) for read in op.reads)] += timeline.full_bytes(op)
    return found


def gathers_ahead(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """For each gather: how many reductions, without those of means, began before the last ``Sizes.prefetch`` places
    where gathers start, and the bytes of all gathers that start at its place, up to itself. Empty if units do not bound
    what is ahead."""
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
        reductions += op.kind is Kind.REDUCE and not timeline.continues(op)
    return found

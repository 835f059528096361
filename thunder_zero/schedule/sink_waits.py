"""Moves the waits of reductions as late as the bytes in flight allow.

A reduction starts where its gradient is computed. Its wait comes right before the return, unless the full gradients in
flight and the gradients computed next would exceed ``Sizes.in_flight_bytes``. Then the oldest reduction must end before
the next gradient is computed. If several reductions are in flight, the oldest wait comes right after the preceding
collective, so that the computations between two collectives stay one region for the fuser::

    reduce a            reduce a
    wait   a            compute ..
    compute ..          reduce b         room for two gradients
    reduce b            wait   a
    wait   b     -->    compute ..       computes the gradient of c
    compute ..          reduce c
    reduce c            wait   b
    wait   c            wait   c
    return a, b, c      return a, b, c

Gathers that start ahead need room, too. A group of gathers that start together, and the gradients in flight, stay
within ``Sizes.in_flight_bytes``. Only reductions that began before the last ``Sizes.prefetch`` groups must end for a
gather: they have overlapped with the compute of that many units. So with one block ahead and two blocks in flight,
three blocks are alive, not four: a block's gradients replace its parameters one by one::

    reduce b                 reduce b       gradients of a and b in flight, parameters of c
    wait   c                 wait   c
    gather d                 wait   a
    wait   a         -->     gather d       gradients of b in flight, parameters of c and d
    compute ..               compute ..     computes the gradient of c

With several replicas, the reduction over replicas reads the intra-replica means. It starts right before the next
reduction::

    reduce a (shard)         reduce a (shard)
    wait   a                 compute ..
    reduce a (replicate)     wait   a
    wait   a          -->    reduce a (replicate)
    compute ..               reduce b (shard)
"""

from __future__ import annotations

from collections import Counter, deque

from thunder_zero.schedule.ops import Compute, Gather, Launch, Op, Reduce, Return, Wait, ends
from thunder_zero.schedule.timeline import Timeline


def sink_waits(timeline: Timeline) -> Timeline:
    """Move the waits of reductions as late as their readers and ``Sizes.in_flight_bytes`` allow."""
    sinking = _Sinking(timeline)
    for index, op in enumerate(timeline.ops):
        sinking.take(index, op)
    return timeline.with_ops(sinking.ops)


class _Sinking:
    """The operations so far, and the waits that are held back."""

    def __init__(self, timeline: Timeline) -> None:
        self.ops: list[Op] = []
        self._timeline = timeline
        self._grad_bytes, self._ahead = making(timeline), gathers_ahead(timeline)
        self._made = 0  # bytes of gradients that are computed, or being computed, and not yet launched
        self._in_flight = 0  # bytes of gradients and means in flight
        self._ended = 0  # number of reductions of gradients that have ended
        self._waits: deque[Wait] = deque()  # waits for reductions of gradients, oldest first
        self._waits_of_means: deque[Wait] = deque()  # waits for reductions of means, oldest first
        self._missing: set[str] = set()  # values that the waits in both queues will write
        self._after_collective = 0  # the index after the latest collective in ``ops``
        # means -> the reduction that reads them, and its wait
        self._reduction_of_means = {
            wait.launch.reads: (wait.launch, wait)
            for wait in timeline.ops
            if isinstance(wait, Wait) and timeline.is_second_reduction(wait.launch)
        }

    def take(self, index: int, op: Op) -> None:
        """Append the next operation, after the waits that must come before it."""
        if self._timeline.is_second_reduction(op):
            return  # it is launched after the wait for the means that it reads
        if ends(op, Reduce):
            self._missing.update(op.writes)
            if not self._timeline.is_second_reduction(op.launch):
                self._waits.append(op)
            return
        self._made += self._grad_bytes[index]
        needs_room = index in self._grad_bytes or isinstance(op, Reduce)
        if isinstance(op, Reduce):
            self._continue_means()
        self._end_before(index, op, needs_room=needs_room)
        if isinstance(op, Reduce):
            self._made -= self._timeline.traffic(op).full
            self._launch(op, len(self.ops))
        else:
            self.ops.append(op)
        self._after_collective = len(self.ops) if isinstance(op, Launch | Wait) else self._after_collective

    def _continue_means(self) -> None:
        """End the reductions whose means another reduction reads."""
        while any(wait.writes in self._reduction_of_means for wait in self._waits):
            self._end_first(len(self.ops))

    def _end_before(self, index: int, op: Op, *, needs_room: bool) -> None:
        """End the reductions that must end before an operation starts."""
        bound = self._timeline.plan.sizes.in_flight_bytes
        begun, starting = self._ahead.get(index, (0, 0))
        is_last = isinstance(op, Return) and op.backward
        if is_last:
            self._continue_means()
        while self._waits or self._waits_of_means:
            due = is_last or not self._missing.isdisjoint(op.reads)
            room = bound - self._made - self._in_flight
            if not (due or (needs_room and room < 0) or (self._ended < begun and room < starting)):
                return
            has_others = len(self._waits) + len(self._waits_of_means) > 1
            self._end(self._after_collective if has_others and needs_room and not due else len(self.ops))

    def _end(self, place: int) -> None:
        """End the oldest reduction of means, or else the oldest reduction of gradients."""
        if self._waits_of_means:
            self._wait(self._waits_of_means.popleft(), place)
        else:
            self._end_first(place)

    def _end_first(self, place: int) -> None:
        """End the oldest reduction of gradients, and launch the reduction that reads its means, if any."""
        wait = self._waits.popleft()
        self._ended += 1
        self._wait(wait, place)
        if wait.writes in self._reduction_of_means:
            launch, last = self._reduction_of_means[wait.writes]
            self._waits_of_means.append(last)
            self._launch(launch, self._after_collective)
            self._after_collective += 1

    def _wait(self, wait: Wait, place: int) -> None:
        self._in_flight -= self._timeline.traffic(wait).full
        self._missing.difference_update(wait.writes)
        self.ops.insert(place, wait)
        self._after_collective = place + 1

    def _launch(self, op: Op, place: int) -> None:
        self._in_flight += self._timeline.traffic(op).full
        self.ops.insert(place, op)


def making(timeline: Timeline) -> Counter[int]:
    """Return a mapping from the index where a reduction's first gradient is computed to the bytes of its gradients."""
    result: Counter[int] = Counter()
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Reduce) and not timeline.is_second_reduction(op):
            result[min(timeline.writer.get(read, index) for read in op.reads)] += timeline.traffic(op).full
    return result


def gathers_ahead(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Return a mapping from the index of each gather to a number of reductions and a number of bytes.

    Gathers with no computation between them are a group. The first number is how many reductions of gradients began
    before the last ``Sizes.prefetch`` groups. The second number is the bytes of the group up to this gather. The
    mapping is empty if ``Sizes.prefetch`` is 0 or ``Policy.times`` replaces it.
    """
    prefetch = timeline.plan.sizes.prefetch
    if timeline.plan.policy.times is not None or prefetch == 0:
        return {}
    begun: list[int] = []  # number of reductions before each group
    result: dict[int, tuple[int, int]] = {}
    reductions, starting, computed = 0, 0, True
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Gather):
            if computed:
                begun.append(reductions)
                starting, computed = 0, False
            starting += timeline.traffic(op).full
            result[index] = begun[-1 - prefetch] if len(begun) > prefetch else 0, starting
        computed |= isinstance(op, Compute)
        reductions += isinstance(op, Reduce) and not timeline.is_second_reduction(op)
    return result

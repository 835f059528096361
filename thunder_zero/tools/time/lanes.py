"""The lanes of a simulated step: compute, and the wires. Rings may take CPU time from compute.

::

    compute   | x         | y      |wait| z |       x takes longer, since a ring uses part of the CPU core
    shard         | ring    | ring      |           a wire carries one ring at a time
    replicate               | ring  |

The load of a ring is the share of the CPU core that the ring needs. While compute runs, the system's scheduler gives
rings at most half of the core, and compute the remaining share. Rings that need more than half take proportionally
longer. Two concurrent rings on wires of one link run at half speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from thunder_zero.tools.devices.device import Cost, Lane

HALF = 0.5  # the largest share of the core for rings while compute runs


@dataclass(slots=True, eq=False)
class Span:
    """An interval of time on a lane. Nothing changes it after the simulation."""

    op: int  # index of the operation in the timeline
    lane: Lane
    # start, end: seconds since the step began. A ring first has the time of its launch, and inf until it starts. While
    # it runs, its end is the time when it ends if it gets its share of the core from now on.
    start: float
    end: float
    waits: Lane | None = None  # the wire for which compute waits, if it waits
    cost: Cost = field(default_factory=Cost)  # of a ring, if it gets the share ``load`` of the core

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Lanes:
    """The lanes of a simulation that visits operations in order. Lanes in ``_shared`` share one link."""

    _shared: frozenset[Lane] = frozenset()
    _spans: list[Span] = field(default_factory=list)
    _now: float = 0.0  # the end of compute so far
    _free: dict[Lane, float] = field(default_factory=dict)  # the end of the last ring on each lane
    _queues: dict[Lane, deque[Span]] = field(default_factory=dict)  # rings that have not ended
    _launched: dict[str, Span] = field(default_factory=dict)  # rings by handle
    _quiet: float = 0.0  # before this time, no ring ends, and none slows compute or another ring

    def spans(self) -> tuple[Span, ...]:
        self._advance(inf)
        return tuple(self._spans)

    def launch(self, op: int, handle: str, cost: Cost) -> None:
        self._quiet = 0.0
        if cost.lane:
            ring = self._launched[handle] = Span(op, cost.lane, self._now, inf, cost=cost)
            self._spans.append(ring)
            self._queues.setdefault(cost.lane, deque()).append(ring)

    def compute(self, op: int, seconds: float, *, always: bool = False) -> None:
        """Advance compute by ``seconds``, and record a span. If ``always``, even a span of 0 seconds is recorded."""
        if not seconds and not always:
            return
        start, end = self._now, self._now + seconds
        if end >= self._quiet:
            self._advance(end, computes=True)
            end = self._now
            self._begin_rings()
            running = self._running()
            ends = [0.0 if ring.cost.load or self._sharing(ring, running) > 1 else ring.end for ring in running]
            self._quiet = min(ends, default=inf)
        self._spans.append(Span(op, Lane.COMPUTE, start, end))
        self._now = end

    def wait(self, op: int, handle: str) -> None:
        ring, start = self._launched.get(handle), self._now
        if ring is None:
            return
        self._quiet = 0.0
        self._advance(start)  # end the rings that have ended by now
        self._advance(inf, awaited=ring)
        if ring.end > start:
            self._spans.append(Span(op, Lane.COMPUTE, start, ring.end, waits=ring.lane))
            self._now = ring.end

    def _advance(self, until: float, *, computes: bool = False, awaited: Span | None = None) -> None:
        """Advance the simulation to a time, or to the end of the awaited ring.

        If ``computes``, compute is busy until this time, or longer under load.
        """
        while awaited is None or awaited in self._queues[awaited.lane]:
            self._begin_rings()
            now, running = self._now, self._running()
            load = sum(ring.cost.load for ring in running)
            taken_share = min(load, HALF) if computes else 0.0
            speed = min(1.0, (HALF if computes else 1.0) / load) if load else 1.0
            end_of_compute = _end_at(until, now, 1 - taken_share)
            ends = [_end_at(ring.end, now, speed / self._sharing(ring, running)) for ring in running]
            if not running and until == inf:
                return
            next_time = min([*ends, end_of_compute])
            elapsed = next_time - now
            for ring, end in zip(running, ends, strict=True):
                if end <= next_time:
                    ring.end = self._free[ring.lane] = next_time
                    self._queues[ring.lane].popleft()
                else:
                    ring.end += elapsed * (1 - speed / self._sharing(ring, running))
            self._now = next_time
            if next_time == end_of_compute:
                return
            if computes:
                until += elapsed * taken_share

    def _running(self) -> list[Span]:
        return [queue[0] for queue in self._queues.values() if queue and queue[0].start <= self._now]

    def _sharing(self, ring: Span, running: list[Span]) -> int:
        """Return the number of running rings that use the link of ``ring``."""
        return sum(other.lane in self._shared for other in running) if ring.lane in self._shared else 1

    def _begin_rings(self) -> None:
        for lane, queue in self._queues.items():
            if queue and queue[0].end == inf:
                queue[0].start = max(queue[0].start, self._free.get(lane, 0.0))
                queue[0].end = queue[0].start + queue[0].cost.wire_seconds


def _end_at(end: float, now: float, speed: float) -> float:
    """Return the new end of work that runs at ``speed`` from now on."""
    return end if speed == 1 else now + (end - now) / speed

"""The lanes of a simulated step: compute, and the wires, whose rings may share its core.

::

    compute   | x         | y      |wait| z |       x is longer while a ring takes a share of its core
    shard         | ring    | ring      |           a wire carries one ring at a time
    replicate               | ring  |

A ring with a load asks for that share of compute's core. While compute runs, they share the core as the system's
scheduler does: rings get what they ask for, up to half of the core, and compute has the rest. Rings that ask for more
than half take longer in proportion. Two rings that run at once on wires of one link each run at half speed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from thunder_zero.tools.cost.costs import Lane

HALF = 0.5  # of the core: what rings get at most while compute runs


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of time on a lane.

    Attributes:
        op: index of the operation in the timeline.
        lane: the lane that it occupies.
        start, end: seconds since the step began.
        after: index of the span whose end let it start; None at the step's beginning.
        waits: True if compute waits for a wire.
    """

    op: int
    lane: Lane
    start: float
    end: float
    after: int | None = None
    waits: bool = False

    @property
    def seconds(self) -> float:
        """The length of the span."""
        return self.end - self.start


SpanEnd = tuple[float, int | None]  # seconds, and the index of the span that ends then


@dataclass(slots=True, eq=False)
class _Ring:
    """A ring that was launched.

    Attributes:
        op, lane, start, after: as in its span.
        index: index of its span.
        seconds: time that it takes if it gets the share of the core that it asks for.
        load: share of the core that it asks for.
        launched: when it was launched.
        end: when it ends if it gets its share from now on; once ``ended``, when it ended.
    """

    op: int
    lane: Lane
    index: int
    seconds: float
    load: float
    launched: SpanEnd
    start: float = inf
    end: float = inf
    after: int | None = None
    ended: bool = False


@dataclass
class Lanes:
    """The lanes of a simulation that visits operations in order. ``shared`` are the lanes of one link."""

    _shared: frozenset[Lane] = frozenset()
    _spans: list[Span | _Ring] = field(default_factory=list)
    _now: SpanEnd = (0.0, None)  # of compute
    _free: dict[Lane, SpanEnd] = field(default_factory=dict)  # the end of the last ring on each lane
    _queues: dict[Lane, deque[_Ring]] = field(default_factory=dict)
    _launched: dict[str, _Ring] = field(default_factory=dict)  # by handle
    _quiet: float = 0.0  # until then no ring ends, and no running ring has a load or shares a link

    def spans(self) -> tuple[Span, ...]:
        """End all rings, and return the spans of what ran."""
        self._advance(inf)
        return tuple(
            item if isinstance(item, Span) else Span(item.op, item.lane, item.start, item.end, item.after)
            for item in self._spans
        )

    def launch(self, op: int, handle: str, wire: tuple[Lane, float] | None, load: float) -> None:
        """Queue the ring of a launch. Do nothing if nothing travels."""
        self._quiet = 0.0
        if wire is not None:
            lane, seconds = wire
            ring = self._launched[handle] = _Ring(op, lane, len(self._spans), seconds, load, self._now)
            self._spans.append(ring)
            self._queues.setdefault(lane, deque()).append(ring)

    def compute(self, op: int, seconds: float, *, always: bool = False) -> None:
        """Compute for some time. Zero seconds leave a span only with ``always``."""
        if not seconds and not always:
            return
        start, after = self._now
        end = start + seconds
        if end >= self._quiet:
            self._advance(end, computes=True)
            end = self._now[0]
            self._begin_rings()
            running = self._running()
            ends = [0.0 if ring.load or self._sharing(ring, running) > 1 else ring.end for ring in running]
            self._quiet = min(ends, default=inf)
        self._spans.append(Span(op, Lane.COMPUTE, start, end, after))
        self._now = end, len(self._spans) - 1

    def wait(self, op: int, handle: str) -> None:
        """Wait until a launch has ended."""
        ring, (start, after) = self._launched.get(handle), self._now
        if ring is None:
            return
        self._quiet = 0.0
        self._advance(start)  # end the rings that have ended by now
        while not ring.ended:
            self._advance(self._next_end())
        if ring.end > start:
            self._spans.append(Span(op, Lane.COMPUTE, start, ring.end, after, waits=True))
            self._now = ring.end, ring.index

    def _next_end(self) -> float:
        """Return when the next ring ends while compute waits."""
        self._begin_rings()
        running = self._running()
        speed = 1 / max(sum(ring.load for ring in running), 1.0)
        return min(_end_at(ring.end, self._now[0], speed / self._sharing(ring, running)) for ring in running)

    def _advance(self, until: float, *, computes: bool = False) -> None:
        """Advance the simulation to a time. With ``computes``, compute ends then, or later by the load of rings."""
        while True:
            self._begin_rings()
            now, running = self._now[0], self._running()
            load = sum(ring.load for ring in running)
            taken = min(load, HALF) if computes else 0.0
            speed = min(1.0, (HALF if computes else 1.0) / load) if load else 1.0
            end_of_compute = _end_at(until, now, 1 - taken)
            ends = [_end_at(ring.end, now, speed / self._sharing(ring, running)) for ring in running]
            if not running and until == inf:
                return
            then = min([*ends, end_of_compute])
            passed = then - now
            for ring, end in zip(running, ends, strict=True):
                if end <= then:
                    ring.end, ring.ended = then, True
                    self._free[ring.lane] = then, ring.index
                    self._queues[ring.lane].popleft()
                else:
                    ring.end += passed * (1 - speed / self._sharing(ring, running))
            self._now = then, self._now[1]
            if then == end_of_compute:
                return
            if computes:
                until += passed * taken

    def _running(self) -> list[_Ring]:
        return [queue[0] for queue in self._queues.values() if queue and queue[0].start <= self._now[0]]

    def _sharing(self, ring: _Ring, running: list[_Ring]) -> int:
        """Return how many of the running rings use the ring's link."""
        return sum(other.lane in self._shared for other in running) if ring.lane in self._shared else 1

    def _begin_rings(self) -> None:
        """Start the first ring in each lane's queue, unless it runs already."""
        for lane, queue in self._queues.items():
            if not queue or queue[0].start < inf:
                continue
            ring = queue[0]
            ring.start, ring.after = max(ring.launched, self._free.get(lane, (0.0, None)), key=lambda moment: moment[0])
            ring.end = ring.start + ring.seconds


def _end_at(end: float, now: float, speed: float) -> float:
    """Return when something ends that runs at a lower speed from now on."""
    return end if speed == 1 else now + (end - now) / speed

"""The lanes of a simulated step: compute, and the wires, whose rings may share its core.

::

    compute   | x         | y      |wait| z |       x is longer while a ring takes a share of its core
    shard         | ring    | ring      |           a wire carries one ring at a time
    replicate               | ring  |

A ring with a load takes that share of the core. If compute runs meanwhile, they share it as the system's scheduler
does: rings get what they ask for up to half of the core, and compute has the rest. If rings ask for more than half,
they take that much longer. Two rings that run at once on wires that share a link take twice as long meanwhile.
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
        op: position of the operation in the timeline.
        lane: where it runs.
        start, end: seconds since the step began.
        after: the span, by its position, whose end let it start; None at the step's beginning.
        waits: compute waits here for the wire.
    """

    op: int
    lane: Lane
    start: float
    end: float
    after: int | None = None
    waits: bool = False

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


SpanEnd = tuple[float, int | None]  # seconds, and the span that ends then


@dataclass(slots=True, eq=False)
class _Ring:
    """A ring that was launched; ``op``, ``lane``, ``start``, ``after`` and ``end`` are as in its span.

    Attributes:
        at: position of its span.
        seconds: that it takes if it gets the share of the core that it asks for, ``load``; ``end`` is at that share,
            until it has ended.
        launched: when, and the span that ends then.
    """

    op: int
    lane: Lane
    at: int
    seconds: float
    load: float
    launched: SpanEnd
    start: float = inf
    end: float = inf
    after: int | None = None
    ended: bool = False


@dataclass
class Lanes:
    """The lanes while a timeline is simulated, in the order of its operations; ``shared`` are those of one link."""

    _shared: frozenset[Lane] = frozenset()
    _found: list[Span | _Ring] = field(default_factory=list)
    _now: SpanEnd = (0.0, None)  # of compute
    _free: dict[Lane, SpanEnd] = field(default_factory=dict)  # when the last ring that ended there did
    _queues: dict[Lane, deque[_Ring]] = field(default_factory=dict)
    _launched: dict[str, _Ring] = field(default_factory=dict)  # by handle
    _quiet: float = 0.0  # until then compute runs alone: no ring ends before, and none that runs has a load, or shares

    def spans(self) -> tuple[Span, ...]:
        """What ran; ends all rings first."""
        self._advance(inf)
        return tuple(
            one if isinstance(one, Span) else Span(one.op, one.lane, one.start, one.end, one.after)
            for one in self._found
        )

    def launch(self, op: int, handle: str, wire: tuple[Lane, float] | None, load: float) -> None:
        """Queue the ring of a launch; nothing may travel."""
        self._quiet = 0.0
        if wire is not None:
            lane, seconds = wire
            ring = self._launched[handle] = _Ring(op, lane, len(self._found), seconds, load, self._now)
            self._found.append(ring)
            self._queues.setdefault(lane, deque()).append(ring)

    def compute(self, op: int, seconds: float, *, always: bool = False) -> None:
        """Compute; leaves no span of no time, unless ``always``."""
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
        self._found.append(Span(op, Lane.COMPUTE, start, end, after))
        self._now = end, len(self._found) - 1

    def wait(self, op: int, handle: str) -> None:
        """Wait until a launch has ended."""
        ring, (start, after) = self._launched.get(handle), self._now
        if ring is None:
            return
        self._quiet = 0.0
        self._advance(start)  # what has ended by now
        while not ring.ended:
            self._advance(self._next_end())
        if ring.end > start:
            self._found.append(Span(op, Lane.COMPUTE, start, ring.end, after, waits=True))
            self._now = ring.end, ring.at

    def _next_end(self) -> float:
        self._begin_rings()
        running = self._running()
        speed = 1 / max(sum(ring.load for ring in running), 1.0)
        return min(_end_at(ring.end, self._now[0], speed / self._sharing(ring, running)) for ring in running)

    def _advance(self, until: float, *, computes: bool = False) -> None:
        """Let time pass until compute's end, which moves while rings slow it down, or until a moment without it."""
        while True:
            self._begin_rings()
            now, running = self._now[0], self._running()
            load = sum(ring.load for ring in running)
            taken = min(load, HALF) if computes else 0.0
            speed = min(1.0, (HALF if computes else 1.0) / load) if load else 1.0
            end_of_compute = _end_at(until, now, 1 - taken)
            ends = [_end_at(ring.end, now, speed / self._sharing(ring, running)) for ring in running]
            then = min(ends, default=inf)
            if not running and until == inf:
                return
            then = min(then, end_of_compute)
            passed = then - now
            for ring, end in zip(running, ends, strict=True):
                if end <= then:
                    ring.end, ring.ended = then, True
                    self._free[ring.lane] = then, ring.at
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
        """How many of the rings that run have a ring's link."""
        return sum(one.lane in self._shared for one in running) if ring.lane in self._shared else 1

    def _begin_rings(self) -> None:
        """Start the first ring of each lane, if nothing is in its way."""
        for lane, queue in self._queues.items():
            if not queue or queue[0].start < inf:
                continue
            ring = queue[0]
            ring.start, ring.after = max(ring.launched, self._free.get(lane, (0.0, None)), key=lambda moment: moment[0])
            ring.end = ring.start + ring.seconds


def _end_at(end: float, now: float, speed: float) -> float:
    """When something ends at a lower speed from now on."""
    return end if speed == 1 else now + (end - now) / speed

"""Simulates a timeline on a compute lane and the lanes of the wire, with its waits.

::

    compute   | x | x      |wait| x     | x |
    inside        | gather a    | gather b |
                  ^ launch      ^ one wire carries one launch at a time

A launch starts once the operations before it are done and its wire is free. A wait ends with its launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from thunder_zero.cost.costs import Cost, costs_of, peak_seconds
from thunder_zero.cost.device import Device
from thunder_zero.cost.wire import Lane
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline


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


@dataclass(frozen=True)
class Estimate:
    """The time of a step's forward and backward; the loss and the optimizer are not in it.

    Attributes:
        timeline: what runs.
        device: on what.
        costs: of each operation.
        spans: when each operation runs: computations, waits that last, and the rings of launches.
        model_seconds: of the model's FLOPs at the device's peak, without work that is done again.
    """

    timeline: Timeline
    device: Device
    costs: tuple[Cost, ...]
    spans: tuple[Span, ...]
    model_seconds: float

    @cached_property
    def seconds(self) -> float:
        """How long the step takes."""
        return max((span.end for span in self.spans if span.lane is Lane.COMPUTE), default=0.0)

    @cached_property
    def compute_seconds(self) -> float:
        """How long the rank computes."""
        return sum(cost.seconds for cost in self.costs)

    @cached_property
    def exposed_seconds(self) -> float:
        """How long compute waits for communication."""
        return sum(span.seconds for span in self.spans if span.waits)

    @cached_property
    def wire_seconds(self) -> Mapping[Lane, float]:
        """How long each wire is busy."""
        found: dict[Lane, float] = {}
        for span in self.spans:
            if span.lane is not Lane.COMPUTE:
                found[span.lane] = found.get(span.lane, 0.0) + span.seconds
        return found

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """Computations and rings, each of which starts where the one before ends; together they take the step."""
        on_compute = [at for at, span in enumerate(self.spans) if span.lane is Lane.COMPUTE and not span.waits]
        at = max(on_compute, key=lambda number: self.spans[number].end, default=None)
        path: list[Span] = []
        while at is not None:
            path.append(self.spans[at])
            at = self.spans[at].after
        return tuple(reversed(path))

    @property
    def flops(self) -> int:
        """FLOPs of all products, attention and convolutions that run."""
        return sum(cost.flops for cost in self.costs)

    @property
    def sent_bytes(self) -> int:
        """What the busiest rank sends."""
        return sum(cost.sent_bytes for cost in self.costs)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the step that the model's FLOPs would take at the device's peak."""
        return self.model_seconds / self.seconds if self.seconds else 0.0

    def tokens_per_second(self, tokens: int) -> float:
        """Tokens that a rank trains in a second, if its share of a batch has this many."""
        return tokens / self.seconds

    def __str__(self) -> str:
        ms = 1e3
        wires = ", ".join(f"{lane} {seconds * ms:.3g} ms" for lane, seconds in self.wire_seconds.items()) or "none"
        return (
            f"step {self.seconds * ms:.3g} ms on {self.device.name}: compute {self.compute_seconds * ms:.3g} ms, "
            f"exposed communication {self.exposed_seconds * ms:.3g} ms (wires: {wires}), MFU {self.mfu:.1%}"
        )


def step_time(timeline: Timeline, device: Device, model: Timeline | None = None) -> Estimate:
    """The time of a scheduled timeline on a device.

    ``model``: the timeline before anything was done again, for the model's FLOPs; None: those that are not ``again``.

    Raises:
        ValueError: the device has no FLOP/s for a dtype, or no link to other nodes where a ring leaves the node.
    """
    costs = costs_of(timeline, device)
    of_model = model or timeline
    model_seconds = sum(peak_seconds(op, of_model, device) for op in of_model.ops if not op.again)
    return Estimate(timeline, device, costs, simulate(timeline, costs, overlaps=device.overlaps), model_seconds)


def simulate(timeline: Timeline, costs: Sequence[Cost], *, overlaps: bool = True) -> tuple[Span, ...]:
    """When each operation runs. Without overlap, compute waits for each launch at once."""
    lanes = _Lanes([], {}, {})
    for at, (op, cost) in enumerate(zip(timeline.ops, costs, strict=True)):
        if op.kind in LAUNCHES:
            lanes.launch(at, op.writes[0], cost)
            if not overlaps:
                lanes.wait(at, op.writes[0])
        elif op.kind is Kind.WAIT:
            lanes.wait(at, op.reads[0])
        elif op.kind is Kind.COMPUTE:
            lanes.run(at, Lane.COMPUTE, cost.seconds)
    return tuple(lanes.spans)


Moment = tuple[float, int | None]  # seconds, and the span that ends then


@dataclass
class _Lanes:
    """The lanes while a timeline is simulated: the spans so far, when each lane is free, when each launch ends."""

    spans: list[Span]
    free: dict[Lane, Moment]
    ends: dict[str, Moment]

    def at(self, lane: Lane) -> Moment:
        return self.free.get(lane, (0.0, None))

    def run(self, op: int, lane: Lane, seconds: float, ready: Moment = (0.0, None)) -> Moment:
        """Occupy a lane from when it is free and what it needs is ready; return the end."""
        start, after = max(ready, self.at(lane), key=lambda moment: moment[0])
        self.spans.append(Span(op, lane, start, start + seconds, after))
        self.free[lane] = start + seconds, len(self.spans) - 1
        return self.free[lane]

    def launch(self, op: int, handle: str, cost: Cost) -> None:
        moment = self.at(Lane.COMPUTE)
        for lane, seconds in cost.wires:
            moment = self.run(op, lane, seconds, moment)
        self.ends[handle] = moment

    def wait(self, op: int, handle: str) -> None:
        now, after = self.at(Lane.COMPUTE)
        end = self.ends[handle]
        if end[0] > now:
            self.spans.append(Span(op, Lane.COMPUTE, now, end[0], after, waits=True))
            self.free[Lane.COMPUTE] = end

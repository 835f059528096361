"""``tz.tools.estimate``: forecasts the time of a step on a device, from its traces or its timeline.

Each operation has a cost, and the operations run on lanes::

    compute  y <- x, w        FLOPs of the product, bytes of x, w and y      seconds on the compute lane
    gather   fut0 <- t_w      a ring of 8 ranks: 7 steps, bytes sent         seconds on the wire inside a node

    compute   | x | x      |wait| x     | x |
    shard         | gather a    | gather b |
                  ^ launch      ^ a wire carries one collective at a time

All ranks form one ring, unless sharding is hybrid. In hybrid sharding, an all-reduce between replicas runs over ranks
that are ``world_size`` apart. Tensor-parallel ranks are neighbours, so distances are multiplied by their number. Their
collectives have their own wire, ``tensor``. If a replica is inside one node, the wires ``shard`` and ``tensor`` share
the node's links.

A collective starts when operations before its launch have ended and its wire is free. A wait ends with its collective.
On a calibrated device, launches and waits also take time from compute, and collectives may slow compute down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite

from thunder_zero.plan.amounts import duration, folded, summed_up
from thunder_zero.plan.mesh import REPLICATE, SHARD, TENSOR, Mesh
from thunder_zero.plan.policy import Times
from thunder_zero.schedule.ops import (
    Compute,
    Exchange,
    Gather,
    Launch,
    Op,
    Return,
    Work,
    ends,
    ends_collective,
    starts_collective,
)
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Cost, Device, Lane, Link, device_of
from thunder_zero.tools.forecast.for_loss import Loss
from thunder_zero.tools.forecast.memory import recorder_of
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.time.lanes import Lanes, Span
from thunder_zero.tools.time.sites import Exchanges, exchanges_of
from thunder_zero.traces.compiled import Traces

REACHED = 0.57, 0.66  # the shares of a bound that published runs reached: docs/plan.md


def estimate(
    traces: Traces,
    device: Device | str,
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    between: Link | str | None = None,
) -> Estimate:
    """Forecast the time of a step's forward and backward, before anything runs.

    A line takes the longer of two times: its FLOPs at the device's peak, and its memory traffic at full bandwidth. A
    ring collective takes the latency of its steps, plus its bytes at the link's speed. The forecast is a lower bound
    for real kernels and networks, and leaves out the host's time. On a calibrated device, lines and collectives take
    measured times.

    Args:
        device: a :class:`~thunder_zero.tools.Device`, a key of ``tz.tools.DEVICES`` such as ``"h100"``, or the path of
            a file (``.json``) from ``thunder-zero calibrate``.
        loss, optimizer: as for :func:`thunder_zero.tools.memory` (default: none). The cost is the sum over operators.
        between: the link between sites, which all ranks of a site share: a rate such as ``"100 Mbit/s"``, or a
            :class:`~thunder_zero.tools.Link`. The times are then those of a step on average, with its share of the
            exchanges of the outer step.
    """
    if not isinstance(traces, Traces):
        raise TypeError(f"estimate takes Traces, got {type(traces).__name__}; pass what trace or traces_of returns")
    described = device_of(device)
    return time_of(recorder_of(traces, loss, optimizer), described, between)


def time_of(recorder: Recorder, device: Device, between: Link | str | None) -> Estimate:
    """Return the time of a recorded step. ``between`` is as for :func:`estimate`."""
    traces = recorder.traces
    time = step_time(recorder.step_timeline(), device, model=traces.lifted)
    if between is None:
        return time
    if (outer := traces.exchanges) is None:
        raise ValueError(f"between is {between!r}, and the step has no outer step; give tz.trace(outer=tz.Outer())")
    return replace(time, exchanges=exchanges_of(traces.plan, outer, between, device))


@dataclass(frozen=True, repr=False)
class Estimate:
    """The time of a step: of forward and backward, and of the loss and the optimizer if :func:`estimate` had them."""

    timeline: Timeline  # the operations
    device: Device  # the device that runs them
    costs: tuple[Cost, ...]  # the cost of each operation
    model_seconds: float  # time of the model's FLOPs at the device's peak, without recomputation
    exchanges: Exchanges | None = None  # with other sites, if the step is that of a site and their link is known

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of computations, of rings, of waits that take time, and of exchanges with other sites."""
        spans = self._alone
        return (*spans, *self.exchanges.spans(len(self.timeline.ops), self.seconds_alone)) if self.exchanges else spans

    @cached_property
    def _alone(self) -> tuple[Span, ...]:
        return simulate(self.timeline, self.costs, self.device)

    @cached_property
    def seconds(self) -> float:
        """The time of the step; with exchanges, on average."""
        return _end_of(self.spans)

    @cached_property
    def seconds_alone(self) -> float:
        """The time of the step without exchanges."""
        return _end_of(self._alone)

    @cached_property
    def compute_seconds(self) -> float:
        """The time that the rank computes, including the time that collectives take from compute."""
        return sum(span.seconds for span in self.spans if span.lane is Lane.COMPUTE and not span.waits)

    @property
    def exposed_seconds(self) -> float:
        """The time that compute waits for communication."""
        return sum(span.seconds for span in self.spans if span.waits)

    @cached_property
    def exposed_on(self) -> Mapping[Lane, float]:
        """The time that compute waits for each wire."""
        return _by_lane((span.waits, span.seconds) for span in self.spans)

    @cached_property
    def wire_seconds(self) -> Mapping[Lane, float]:
        """The time that each wire is busy."""
        return _by_lane((span.lane, span.seconds) for span in self.spans if span.lane is not Lane.COMPUTE)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that ends with the step. Each span starts when its predecessor in the chain ends."""
        path, start = [], self.seconds
        for span in reversed(self.spans):
            if span.end == start and not span.waits:
                path.append(span)
                start = span.start
        return tuple(reversed(path))

    @property
    def flops(self) -> int:
        """The FLOPs of all matrix products, attention and convolutions."""
        return sum(cost.flops for cost in self.costs)

    @property
    def busiest_bytes(self) -> int:
        """The bytes that the busiest rank sends."""
        return sum(cost.busiest_bytes for cost in self.costs)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the step that the model's FLOPs would take at the device's peak."""
        return self.model_seconds / self.seconds if self.seconds else 0.0

    def tokens_per_second(self, tokens: int) -> float:
        """Return a rank's throughput in tokens per second. ``tokens`` is the rank's number of tokens in a step."""
        return tokens / self.seconds

    def __repr__(self) -> str:
        return summed_up(self, str(self))

    def __str__(self) -> str:
        tensor_seconds = self.exposed_on.get(Lane.TENSOR, 0.0)
        slices = f"{duration(tensor_seconds)} of it for slices; " if tensor_seconds else ""
        wires = ", ".join(f"{lane} {duration(seconds)}" for lane, seconds in self.wire_seconds.items()) or "none"
        mean = self.exchanges.mean_seconds if self.exchanges else float
        expected = " to ".join(duration(mean(self.seconds_alone / share)) for share in reversed(REACHED))
        return folded(
            f"step {duration(self.seconds)} on {self.device.name}: compute {duration(self.compute_seconds)}, exposed "
            f"communication {duration(self.exposed_seconds)} ({slices}wires: {wires}), MFU {self.mfu:.1%}"
            + (f"; a bound, expect {expected}" if not self.device.is_measured else "")
            + (f"; {self.exchanges.described(self.seconds_alone)}" if self.exchanges else "")
        )


def _end_of(spans: Sequence[Span]) -> float:
    return max((span.end for span in spans if span.lane is Lane.COMPUTE), default=0.0)


def _by_lane(times: Iterable[tuple[Lane | None, float]]) -> dict[Lane, float]:
    seconds: dict[Lane, float] = {}
    for lane, taken in times:
        if lane is not None:
            seconds[lane] = seconds.get(lane, 0.0) + taken
    return seconds


def step_time(timeline: Timeline, device: Device, *, model: Timeline | None = None) -> Estimate:
    """Forecast the time of a scheduled timeline on a device.

    MFU is computed from the FLOPs of ``model``, a timeline without recomputation (default: the operations of
    ``timeline`` that are not ``repeated``).
    """
    costs = tuple(_cost(op, timeline, device) for op in timeline.ops)
    return Estimate(timeline, device, costs, sum(model_seconds(model or timeline, device)))


def seconds_around(recorder: Recorder, device: Device) -> dict[str, float]:
    """Return the seconds of digests, of the loss with its gradient, and of the optimizer's step, keyed by phase."""
    timeline, phases = recorder.step_timeline(), recorder.around.items()
    return {phase: sum(_cost(op, timeline, device).seconds for op in around.ops) for phase, around in phases}


def model_seconds(timeline: Timeline, device: Device) -> list[float]:
    """Return the time of each operation's FLOPs at the device's peak, or 0 for a recomputed operation."""
    flops = (op.flops if isinstance(op, Compute) and not op.repeated else 0 for op in timeline.ops)
    pairs = zip(flops, timeline.ops, strict=True)
    return [count / device.peak(compute_dtype(op, timeline)) if count else 0.0 for count, op in pairs]


def simulate(timeline: Timeline, costs: Sequence[Cost], device: Device) -> tuple[Span, ...]:
    """Return the spans of the operations. If ``Device.overlaps`` is False, compute waits right after each launch."""
    shared = (Lane.SHARD, Lane.TENSOR) if in_node(timeline.plan.mesh, device) else ()
    lanes = Lanes(frozenset(shared))
    finishing: dict[str, float] = {}
    for index, (op, cost) in enumerate(zip(timeline.ops, costs, strict=True)):
        if starts_collective(op):
            lanes.compute(index, cost.launch_seconds)
            lanes.launch(index, op.writes[0], cost)
            finishing[op.writes[0]] = cost.finish_seconds
            if not device.overlaps:
                lanes.wait(index, op.writes[0])
        elif ends_collective(op):
            lanes.wait(index, op.reads[0])
            lanes.compute(index, finishing.pop(op.reads[0], 0.0))  # backward may wait for a collective of forward again
        elif isinstance(op, Compute | Return):  # a return takes no time, and ends the critical path
            lanes.compute(index, cost.seconds, always=True)
    return lanes.spans()


# A collective's wire, and the arguments of ``Device.collective``: kind, number of ranks, distance between neighbours in
# ranks, bytes that the busiest rank sends, number of messages from each rank to its neighbour, tensors in the bucket.
Ring = tuple[Lane, tuple[str, int, int, int, int, int]]


def ring(op: Op, timeline: Timeline) -> Ring | None:
    """Return the ring of a launch, or None if no bytes are sent. An all-to-all has the bytes and steps of a scatter."""
    if not (nbytes := timeline.traffic(op).busiest):
        return None
    mesh = timeline.plan.mesh
    if isinstance(op, Compute) and isinstance(op.work, Exchange):
        moves, ranks = op.work.moves, mesh.tensor.size
        return Lane.TENSOR, (moves, ranks, 1, nbytes, (1 + (moves == "all_reduce")) * (ranks - 1), 1)
    assert isinstance(op, Launch), "nothing else sends bytes"
    ranks, tensors = timeline.plan.ranks_over(op.over), len(op.params)
    if op.over == TENSOR:
        return Lane.TENSOR, ("all_reduce", ranks, 1, nbytes, 2 * (ranks - 1), tensors)
    lane, stride = Lane.SHARD if op.over == SHARD else Lane.REPLICATE, mesh.tensor.size
    if op.over == REPLICATE:
        stride *= mesh.shard.size
    elif (param := timeline.params_of(op)[0]).sharded or param.owner is not None:
        return lane, ("gather" if isinstance(op, Gather) else "scatter", ranks, stride, nbytes, ranks - 1, tensors)
    return lane, ("all_reduce", ranks, stride, nbytes, 2 * (ranks - 1), tensors)


def compute_dtype(op: Op, timeline: Timeline) -> str:
    """Return the dtype of the first floating-point tensor that an operation reads.

    If it reads no such tensor, return the dtype of the first tensor. If it reads no tensor, return "".
    """
    dtypes = [timeline.values[name].dtype for name in op.reads if name in timeline.values]
    return next((dtype for dtype in dtypes if "float" in dtype), next(iter(dtypes), ""))


def _cost(op: Op, timeline: Timeline, device: Device) -> Cost:
    if isinstance(op, Compute) and isinstance(op.work, Exchange):
        return _cost_of_ring(op, timeline, device)
    if isinstance(op, Launch):
        cost = _cost_of_ring(op, timeline, device)
        encode, decode = _coding_seconds(op, timeline, device)
        launch, finish = cost.launch_seconds + encode, cost.finish_seconds + decode
        return replace(cost, traffic_bytes=timeline.moved(op), launch_seconds=launch, finish_seconds=finish)
    if not isinstance(op, Compute) or op.work in (Work.NONE, Work.AWAIT):
        return Cost()
    nbytes = timeline.moved(op)
    seconds = device.seconds(op.flops, compute_dtype(op, timeline), nbytes, str(op.work))
    return Cost(flops=op.flops, traffic_bytes=nbytes, seconds=seconds)


def _coding_seconds(op: Launch, timeline: Timeline, device: Device) -> tuple[float, float]:
    """Return the seconds in which a launch encodes its messages, and decodes messages."""
    encode = decode = 0.0
    for param, (encoded, decoded) in zip(timeline.params_of(op), timeline.coded(op), strict=True):
        in_blocks = timeline.travels_as(op, param).block  # otherwise it is a cast
        encode += device.seconds(0, "", encoded, "encode" if in_blocks else Work.POINTWISE) if encoded else 0.0
        decode += device.seconds(0, "", decoded, "decode" if in_blocks else Work.POINTWISE) if decoded else 0.0
    return encode, decode


def in_node(mesh: Mesh, device: Device) -> bool:
    return mesh.shard.size * mesh.tensor.size <= device.devices_per_node


def _cost_of_ring(op: Op, timeline: Timeline, device: Device) -> Cost:
    """Return the cost of a collective. If a replica is on several nodes, all rings share a node's network cards."""
    if (found := ring(op, timeline)) is None:
        return Cost()
    lane, arguments = found
    shares = lane is Lane.REPLICATE and not in_node(timeline.plan.mesh, device)
    busiest_bytes = timeline.traffic(op).busiest
    return replace(device.collective(*arguments), busiest_bytes=busiest_bytes, lane=Lane.SHARD if shares else lane)


def by_times(forecast: Estimate, times: Times) -> Estimate:
    """Return the estimate with measured seconds between waits for gathers, and with the measured gather speed.

    The mean factor of the measured lines scales lines before the first wait or after the last wait of a phase, which
    are not measured. Measured compute includes load, launch and finish, so they become 0, and slices' collectives.
    """
    timeline, ops = forecast.timeline, forecast.timeline.ops
    costs = [replace(cost, load=0.0, launch_seconds=0.0, finish_seconds=0.0) for cost in forecast.costs]
    slices = {index for index, op in enumerate(ops) if isinstance(op, Compute) and op.between_slices}
    busy, factors = defaultdict[int, float](float), dict[int, float]()
    for span in replace(forecast, costs=tuple(costs)).spans:
        busy[span.op] += span.seconds if span.lane is Lane.COMPUTE and (not span.waits or span.op in slices) else 0.0
    for wait, following in pairwise(index for index, op in enumerate(ops) if ends(op, Gather)):
        phase, between = (times.forward, times.backward)[ops[wait].backward], range(wait + 1, following)
        seconds, total = phase.get(ops[wait].params[0]), sum(busy[index] for index in between)
        if seconds is not None and total and ops[following].backward is ops[wait].backward:
            factors |= dict.fromkeys(between, seconds / total)
    expected = sum(busy[index] for index in factors)
    mean = sum(busy[index] * factor for index, factor in factors.items()) / expected if expected else 1.0
    gathers = [index for index, op in enumerate(ops) if isinstance(op, Gather)]
    on_wire = sum(costs[index].wire_seconds for index in gathers)
    speed = sum(timeline.traffic(ops[index]).busiest for index in gathers) / on_wire if on_wire else 0.0  # as forecast
    wire_factor = speed / times.bytes_per_second if speed and isfinite(times.bytes_per_second) else 1.0
    for index, cost in enumerate(costs):
        factor = factors.get(index, mean)
        wire = cost.wire_seconds * (factor if index in slices else wire_factor)
        costs[index] = replace(cost, seconds=cost.seconds * factor, wire_seconds=wire)
    return replace(forecast, costs=tuple(costs))

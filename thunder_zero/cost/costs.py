"""The cost of each operation on a device: FLOPs, traffic with memory, bytes sent, seconds."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_zero.cost.device import Device
from thunder_zero.cost.traffic import compute_dtype, traffic_bytes
from thunder_zero.cost.wire import Lane, rings
from thunder_zero.schedule.timeline import Op, Timeline


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operation needs.

    Attributes:
        flops: of its products, attention and convolutions.
        traffic_bytes: read from memory and written to it.
        sent_bytes: what the busiest rank sends.
        seconds: on the compute lane.
        peak_seconds: of its FLOPs alone, at the device's peak.
        wires: the lane and the seconds of each ring of a launch, one after the other.
    """

    flops: int = 0
    traffic_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    peak_seconds: float = 0.0
    wires: tuple[tuple[Lane, float], ...] = ()


def costs_of(timeline: Timeline, device: Device) -> tuple[Cost, ...]:
    """The costs of the operations, in their order.

    Raises:
        ValueError: the device has no FLOP/s for a dtype, or no link to other nodes where a ring leaves the node.
    """
    return tuple(_cost(op, timeline, device) for op in timeline.ops)


def _cost(op: Op, timeline: Timeline, device: Device) -> Cost:
    parts = rings(op, timeline)
    traffic = traffic_bytes(op, timeline)
    return Cost(
        flops=op.flops,
        traffic_bytes=traffic,
        sent_bytes=sum(part.nbytes for part in parts),
        seconds=device.seconds(op.flops, compute_dtype(op, timeline), traffic),
        peak_seconds=peak_seconds(op, timeline, device),
        wires=tuple(
            (part.lane, device.ring(part.ranks, part.stride).seconds(part.nbytes, part.steps)) for part in parts
        ),
    )


def peak_seconds(op: Op, timeline: Timeline, device: Device) -> float:
    """Seconds of an operation's FLOPs at the device's peak."""
    return op.flops / device.peak(compute_dtype(op, timeline)) if op.flops else 0.0

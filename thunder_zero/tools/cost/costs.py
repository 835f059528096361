"""The cost of each operation on a device: FLOPs, traffic with memory, bytes sent, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline, Work
from thunder_zero.tools.cost.fused import FREE, fused_traffic
from thunder_zero.tools.cost.traffic import cast_bytes, compute_dtype, traffic_bytes
from thunder_zero.tools.cost.wire import Lane, Ring, rings
from thunder_zero.tools.devices.device import Device


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operation needs.

    Attributes:
        flops: of its products, attention and convolutions.
        traffic_bytes: read from memory and written to it; of launches, by casts to the dtype on the wire.
        sent_bytes: what the busiest rank sends.
        seconds: on the compute lane.
        wires: the lane and the seconds of each ring of a launch, one after the other.
        loads: of each ring: the share of the core that it takes from compute while it is under way; () if none does.
        launch_seconds: on the compute lane, before a launch begins.
        finish_seconds: on the compute lane, once all of a launch has arrived.
    """

    flops: int = 0
    traffic_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    wires: tuple[tuple[Lane, float], ...] = ()
    loads: tuple[float, ...] = ()
    launch_seconds: float = 0.0
    finish_seconds: float = 0.0


def costs_of(timeline: Timeline, device: Device, *, fused: bool = False) -> tuple[Cost, ...]:
    """The costs of the operations, in their order.

    Args:
        timeline: of a step.
        device: that runs it.
        fused: whether pointwise lines that nothing lies between are one kernel, whose costs its last line has.

    Raises:
        ValueError: the device has no FLOP/s for a dtype, or no link to other nodes where a ring leaves the node.
    """
    if not fused:
        return tuple(
            _cost(op, traffic_bytes(op, timeline), timeline, device, runs=op.work is not Work.NONE)
            for op in timeline.ops
        )
    traffic = fused_traffic(timeline)
    return tuple(
        _cost(op, nbytes, timeline, device, runs=bool(nbytes or op.flops))
        for op, nbytes in zip(timeline.ops, traffic, strict=True)
    )


def _cost(op: Op, nbytes: int, timeline: Timeline, device: Device, *, runs: bool) -> Cost:
    """``nbytes``: traffic of a computation; ``runs``: whether it is a kernel of its own."""
    if op.kind in LAUNCHES:
        one_wire = timeline.plan.world_size > device.devices_per_node
        cost, cast = _cost_of_launch(rings(op, timeline), device, one_wire), cast_bytes(op, timeline)
        held = device.seconds(0, "", cast, Work.POINTWISE) if cast else 0.0
        return replace(cost, traffic_bytes=cast, launch_seconds=cost.launch_seconds + held)
    if op.kind is not Kind.COMPUTE or not runs:
        return Cost()
    work = Work.POINTWISE if nbytes and op.work in FREE else op.work  # the last line of a fused kernel may be a view
    seconds = device.seconds(op.flops, compute_dtype(op, timeline), nbytes, work)
    return Cost(flops=op.flops, traffic_bytes=nbytes, seconds=seconds)


def _cost_of_launch(parts: Sequence[Ring], device: Device, one_wire: bool) -> Cost:
    """``one_wire``: a copy of the model takes several nodes: its rings, too, use all network cards of a node."""
    sent = [
        device.collective(part.sends, part.ranks, part.stride, part.nbytes, part.steps, part.tensors) for part in parts
    ]
    loads = tuple(min(one.taken_seconds / one.seconds, 1.0) if one.seconds else 0.0 for one in sent)
    return Cost(
        sent_bytes=sum(part.nbytes for part in parts),
        wires=tuple(
            (Lane.INSIDE if one_wire else part.lane, one.seconds) for part, one in zip(parts, sent, strict=True)
        ),
        loads=loads if any(loads) else (),
        launch_seconds=sum(one.launch_seconds for one in sent),
        finish_seconds=sum(one.finish_seconds for one in sent),
    )


def peak_seconds(op: Op, timeline: Timeline, device: Device) -> float:
    """Seconds of an operation's FLOPs at the device's peak."""
    return op.flops / device.peak(compute_dtype(op, timeline)) if op.flops else 0.0

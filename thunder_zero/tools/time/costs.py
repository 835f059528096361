"""The cost of each operation on a device: FLOPs, memory traffic, bytes sent, seconds.

::

    compute  y <- x, w        FLOPs of the product, bytes of x, w and y      seconds on the compute lane
    gather   fut0 <- t_w      a ring of 8 ranks: 7 steps, bytes sent         seconds on the wire inside a node

All ranks form one ring, unless sharding is hybrid. In hybrid sharding, an all-reduce between replicas runs over ranks
that are ``world_size`` apart. Tensor-parallel ranks are neighbours, so distances are multiplied by their number.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_zero.plan.mesh import REPLICATE, SHARD, TENSOR, Mesh
from thunder_zero.plan.traffic import gather_work, reduce_work
from thunder_zero.schedule.ops import Compute, Exchange, Gather, Launch, Op, Work
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Cost, Device, Lane

REACHED = 0.57, 0.66  # the shares of a bound that published runs reached: docs/plan.md


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
    elif timeline.params_of(op)[0].sharded:
        return lane, ("gather" if isinstance(op, Gather) else "scatter", ranks, stride, nbytes, ranks - 1, tensors)
    return lane, ("all_reduce", ranks, stride, nbytes, 2 * (ranks - 1), tensors)


def traffic_bytes(op: Op, timeline: Timeline) -> int:
    """Return the bytes that a computation reads and writes, or 0 for a view and for an operation of another kind.

    Count each tensor once, and for an expanded tensor the memory that it views. For an indexed tensor, such as an
    embedding table, count at most the written bytes. Count only the inputs and outputs of a fused region.
    """
    if not isinstance(op, Compute) or op.between_slices or op.work in (Work.NONE, Work.VIEW):
        return 0
    written_bytes = sum(timeline.nbytes(name) for name in op.updates or op.writes)
    read_bytes = [_read_bytes(name, timeline) for name in dict.fromkeys(op.reads) if name not in op.updates]
    if op.work is Work.INDEX:
        read_bytes = [min(nbytes, written_bytes) for nbytes in read_bytes]
    return written_bytes + sum(read_bytes)


def _read_bytes(name: str, timeline: Timeline) -> int:
    """Return the bytes of a value, at most the bytes of the memory that the value views."""
    return min(timeline.nbytes(name), timeline.nbytes(timeline.memory(name)) or timeline.nbytes(name))


def _coding(op: Launch, timeline: Timeline) -> tuple[int, int]:
    """Return the bytes of memory traffic to encode a launch's payload, and to decode the launch's result."""
    plan = timeline.plan
    work = [
        gather_work(plan, param) if isinstance(op, Gather) else reduce_work(plan, param, op.over)
        for param in timeline.params_of(op)
    ]
    return sum(encoded for encoded, _ in work), sum(decoded for _, decoded in work)


def compute_dtype(op: Op, timeline: Timeline) -> str:
    """Return the dtype of the first floating-point tensor that an operation reads.

    If it reads no such tensor, return the dtype of the first tensor. If it reads no tensor, return "".
    """
    dtypes = [timeline.values[name].dtype for name in op.reads if name in timeline.values]
    return next((dtype for dtype in dtypes if "float" in dtype), next(iter(dtypes), ""))


def costs_of(timeline: Timeline, device: Device) -> tuple[Cost, ...]:
    """Return the cost of each operation."""
    return tuple(_cost(op, timeline, device) for op in timeline.ops)


def _cost(op: Op, timeline: Timeline, device: Device) -> Cost:
    if isinstance(op, Compute) and isinstance(op.work, Exchange):
        return _cost_of_ring(op, timeline, device)
    if isinstance(op, Launch):
        cost, coding = _cost_of_ring(op, timeline, device), _coding(op, timeline)
        encode_seconds, decode_seconds = (
            device.seconds(0, "", nbytes, Work.POINTWISE) if nbytes else 0.0 for nbytes in coding
        )
        return replace(
            cost,
            traffic_bytes=sum(coding),
            launch_seconds=cost.launch_seconds + encode_seconds,
            finish_seconds=cost.finish_seconds + decode_seconds,
        )
    if not isinstance(op, Compute) or op.work in (Work.NONE, Work.AWAIT):
        return Cost()
    nbytes = traffic_bytes(op, timeline)
    seconds = device.seconds(op.flops, compute_dtype(op, timeline), nbytes, str(op.work))
    return Cost(flops=op.flops, traffic_bytes=nbytes, seconds=seconds)


def in_node(mesh: Mesh, device: Device) -> bool:
    """Return whether a replica is inside one node."""
    return mesh.shard.size * mesh.tensor.size <= device.devices_per_node


def _cost_of_ring(op: Op, timeline: Timeline, device: Device) -> Cost:
    """Return the cost of a collective. If a replica is on several nodes, all rings share a node's network cards."""
    if (found := ring(op, timeline)) is None:
        return Cost()
    lane, arguments = found
    shares = lane is Lane.REPLICATE and not in_node(timeline.plan.mesh, device)
    sent_bytes = timeline.traffic(op).busiest
    return replace(device.collective(*arguments), sent_bytes=sent_bytes, lane=Lane.SHARD if shares else lane)

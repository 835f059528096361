"""The cost of each operation on a device: FLOPs, traffic with memory, bytes sent, seconds.

::

    compute  y <- x, w        FLOPs of a product; bytes of x, w and y        seconds on the compute lane
    gather   fut0 <- t_w      a ring: 7 steps of 8 ranks, bytes sent         seconds on the wire inside a node

Without hybrid sharding all ranks are one ring. With it, an all-reduce across the copies of the model, of the rows that
a rank owns, goes over ranks that are ``world_size`` apart. Ranks that compute with slices of the same parameters are
next to each other, so the ranks of all other rings are as many times further apart.

Traces of a run on CPUs have pointwise lines one by one. Where they count as fused, as nvFuser or inductor would, those
that no product, attention or collective lies between are one kernel: it reads each value from outside once, and writes
what somebody outside reads. Depth is the number of kernels of other kinds that a line must come after; a line that may
come later is as deep as what reads it first. What is no line of a trace (a loss, an optimizer) runs operator by
operator.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum

import networkx as nx

from thunder_zero.plan.mesh import REPLICATE, SHARD, TENSOR, Mesh
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline, Work
from thunder_zero.tools.devices.device import Device


class Lane(StrEnum):
    """What runs one thing after another."""

    COMPUTE = "compute"
    SHARD = "shard"  # the wire of the shard group
    REPLICATE = "replicate"  # the wire of the replicate group
    TENSOR = "tensor"  # that of torch's tensor parallelism


class Sends(StrEnum):
    """What a ring does."""

    GATHER = "gather"
    SCATTER = "scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"  # no ring, and as many bytes and steps as a scatter


@dataclass(frozen=True, slots=True)
class Ring:
    """What a launch is on its wire: a ring of ``ranks`` that are ``stride`` apart. ``nbytes`` is what the busiest one
    sends, and receives; each sends ``steps`` times to its neighbour."""

    lane: Lane
    ranks: int
    stride: int
    nbytes: int
    steps: int
    sends: Sends = Sends.GATHER
    tensors: int = 1


def ring(op: Op, timeline: Timeline) -> Ring | None:
    """The ring of a launch, which sends its ``wire_bytes``; None if nothing travels."""
    nbytes = timeline.wire_bytes(op) if op.kind in LAUNCHES else op.sends
    if not nbytes:
        return None
    mesh, ranks = timeline.plan.mesh, timeline.plan.ranks_over(op.over)
    if op.moves:
        moves = Sends(op.moves)
        return Ring(Lane.TENSOR, ranks, 1, nbytes, (1 + (moves is Sends.ALL_REDUCE)) * (ranks - 1), moves)
    if op.over == TENSOR:
        return Ring(Lane.TENSOR, ranks, 1, nbytes, 2 * (ranks - 1), Sends.ALL_REDUCE, len(op.params))
    lane, stride = Lane.SHARD if op.over == SHARD else Lane.REPLICATE, mesh.tensor.size
    steps, moves = 2 * (ranks - 1), Sends.ALL_REDUCE
    if op.over == REPLICATE:
        stride *= mesh.shard.size
    elif timeline.params_of(op)[0].sharded:
        steps, moves = ranks - 1, Sends.GATHER if op.kind is Kind.GATHER else Sends.SCATTER
    return Ring(lane, ranks, stride, nbytes, steps, moves, len(op.params))


def traffic_bytes(op: Op, timeline: Timeline) -> int:
    """Bytes that a computation reads and writes; 0 of views, and of all that is not COMPUTE. Each tensor is read once,
    no more than the memory that it views (an expanded one), and of tensors that are indexed no more than is written (an
    embedding's rows). A fused region has its inputs and outputs."""
    if op.kind is not Kind.COMPUTE or op.is_torchs or op.work in (Work.NONE, Work.VIEW):
        return 0
    written = sum(timeline.nbytes(name) for name in op.updates or op.writes)
    read = [_read_bytes(name, timeline) for name in dict.fromkeys(op.reads) if name not in op.updates]
    if op.work is Work.INDEX:
        read = [min(nbytes, written) for nbytes in read]
    return written + sum(read)


def _read_bytes(name: str, timeline: Timeline) -> int:
    """Bytes of a value that is read once: no more than the memory that it views."""
    return min(timeline.nbytes(name), timeline.nbytes(timeline.memory(name)) or timeline.nbytes(name))


def _coding(op: Op, timeline: Timeline) -> tuple[int, int]:
    """Bytes that are read and written to encode what a launch sends, and to decode what arrives."""
    plan = timeline.plan
    work = [
        plan.gather_work(param) if op.kind is Kind.GATHER else plan.reduce_work(param, op.over)
        for param in timeline.params_of(op)
    ]
    return sum(encoded for encoded, _ in work), sum(decoded for _, decoded in work)


def compute_dtype(op: Op, timeline: Timeline) -> str:
    """The dtype of an operation's products: that of the first floating-point tensor that it reads, or of the first
    tensor; "" if it reads none."""
    dtypes = [timeline.values[name].dtype for name in op.reads if name in timeline.values]
    return next((dtype for dtype in dtypes if "float" in dtype), next(iter(dtypes), ""))


FREE = frozenset({Work.VIEW, Work.NONE})
FUSED = FREE | {Work.POINTWISE, Work.REDUCTION}


def fused_traffic(timeline: Timeline) -> tuple[int, ...]:
    """Bytes that each operation reads and writes. Those of a fused kernel, what it reads from outside and what it makes
    that others need, are at its last line; views are free."""
    kernels, stored, readers = _kernels(timeline), _stored_in(timeline), _readers(timeline)
    inside = {at for kernel in kernels for at in kernel}
    found = [0 if at in inside else traffic_bytes(op, timeline) for at, op in enumerate(timeline.ops)]
    for kernel in kernels:
        members, ops = set(kernel), [timeline.ops[at] for at in kernel]
        computing = [op for op in ops if op.work not in FREE]
        made = {stored[name] for op in computing for name in op.writes}
        read = {stored.get(name, name): name for op in computing for name in op.reads}
        needed = {stored[name] for op in ops for name in op.writes if not members.issuperset(readers[name])}
        from_outside = sum(_read_bytes(name, timeline) for memory, name in read.items() if memory not in made)
        found[kernel[-1]] = from_outside + sum(map(timeline.nbytes, made & needed))
    return tuple(found)


def _stored_in(timeline: Timeline) -> dict[str, str]:
    """The value whose memory each value is in; what has the work of a view is in that of what it reads, as
    :func:`thunder_zero.tools.cost.costs.traffic_bytes` has it."""
    stored: dict[str, str] = {}
    for op in timeline.ops:
        for name in op.writes:
            seen = op.reads[0] if op.work is Work.VIEW and op.reads else timeline.memory(name)
            stored[name] = stored.get(seen, timeline.memory(seen)) if seen != name else name
    return stored


def _is_fused(op: Op) -> bool:
    is_line = op.kind is Kind.COMPUTE and not op.is_torchs
    return is_line and op.work in FUSED and not op.updates and bool(op.source)


def _readers(timeline: Timeline) -> defaultdict[str, list[int]]:
    """The positions that read each value; those that free it do not."""
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for at, op in enumerate(timeline.ops):
        for name in op.reads if op.kind is not Kind.FREE else ():
            readers[name].append(at)
    return readers


def _kernels(timeline: Timeline) -> list[list[int]]:
    """The positions of each fused kernel: lines of one phase and depth that are connected by values."""
    depths, graph, written = _depths(timeline), nx.Graph(), dict[str, int]()
    for at, op in enumerate(timeline.ops[:-1]):
        if _is_fused(op):
            graph.add_node(at)
            for before in (written[name] for name in op.reads if name in written):
                if depths[before] == depths[at] and timeline.ops[before].backward is op.backward:
                    graph.add_edge(before, at)
            written.update(dict.fromkeys(op.writes, at))
    return [sorted(kernel) for kernel in nx.connected_components(graph)]


def _depths(timeline: Timeline) -> list[int]:
    """The depth of each operation in its phase."""
    depths = [0] * len(timeline.ops)
    of: dict[str, int] = {}
    for at, op in enumerate(timeline.ops):
        if at == timeline.backward_start:
            of.clear()
        read = max((of.get(name, 0) for name in op.reads), default=0)
        depths[at] = read + (op.kind is Kind.COMPUTE and not _is_fused(op))
        of.update(dict.fromkeys(op.writes, depths[at]))
    readers = _readers(timeline)
    for at in reversed(range(len(timeline.ops) - 1)):
        op = timeline.ops[at]
        if _is_fused(op):
            later = [
                _latest(timeline.ops[reader], depths[reader])
                for name in op.writes
                for reader in readers[name]
                if timeline.ops[reader].backward is op.backward and reader < len(timeline.ops) - 1
            ]
            depths[at] = max(depths[at], min(later, default=0))
    return depths


def _latest(reader: Op, depth: int) -> int:
    return depth if _is_fused(reader) or reader.kind is not Kind.COMPUTE else depth - 1


@dataclass(frozen=True, slots=True)
class Cost:
    """What one operation needs.

    Attributes:
        flops: of its products, attention and convolutions.
        traffic_bytes: read from memory and written to it; of launches, to encode what is sent and to decode it.
        sent_bytes: what the busiest rank sends.
        seconds: on the compute lane.
        wire: the lane and the seconds of a launch; None if nothing travels.
        load: the share of the core that it takes from compute while it is under way.
        launch_seconds: on the compute lane, before a launch begins.
        finish_seconds: on the compute lane, once all of a launch has arrived.
    """

    flops: int = 0
    traffic_bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    wire: tuple[Lane, float] | None = None
    load: float = 0.0
    launch_seconds: float = 0.0
    finish_seconds: float = 0.0


def costs_of(timeline: Timeline, device: Device, *, fused: bool = False) -> tuple[Cost, ...]:
    """The costs of the operations, in their order. If ``fused``, pointwise lines that nothing lies between are one
    kernel, whose costs its last line has."""
    traffic = fused_traffic(timeline) if fused else [traffic_bytes(op, timeline) for op in timeline.ops]
    return tuple(
        _cost(op, nbytes, timeline, device, runs=bool(nbytes or op.flops) if fused else op.work is not Work.NONE)
        for op, nbytes in zip(timeline.ops, traffic, strict=True)
    )


def _cost(op: Op, nbytes: int, timeline: Timeline, device: Device, *, runs: bool) -> Cost:
    """``nbytes``: traffic of a computation; ``runs``: whether it is a kernel of its own."""
    if op.is_torchs:
        return _cost_of_launch(ring(op, timeline), device, one_wire=False)
    if op.kind in LAUNCHES:
        one_wire = op.over != TENSOR and not in_node(timeline.plan.mesh, device)
        cost, coding = _cost_of_launch(ring(op, timeline), device, one_wire), _coding(op, timeline)
        before, after = (device.seconds(0, "", nbytes, Work.POINTWISE) if nbytes else 0.0 for nbytes in coding)
        return replace(
            cost,
            traffic_bytes=sum(coding),
            launch_seconds=cost.launch_seconds + before,
            finish_seconds=cost.finish_seconds + after,
        )
    if op.kind is not Kind.COMPUTE or not runs:
        return Cost()
    work = Work.POINTWISE if nbytes and op.work in FREE else op.work  # the last line of a fused kernel may be a view
    seconds = device.seconds(op.flops, compute_dtype(op, timeline), nbytes, work)
    return Cost(flops=op.flops, traffic_bytes=nbytes, seconds=seconds)


def in_node(mesh: Mesh, device: Device) -> bool:
    """Return whether a copy of the model is in one node."""
    return mesh.shard.size * mesh.tensor.size <= device.devices_per_node


def _cost_of_launch(part: Ring | None, device: Device, one_wire: bool) -> Cost:
    """``one_wire``: a copy of the model takes several nodes: its rings, too, use all network cards of a node."""
    if part is None:
        return Cost()
    sent = device.collective(part.sends, part.ranks, part.stride, part.nbytes, part.steps, part.tensors)
    return Cost(
        sent_bytes=part.nbytes,
        wire=(Lane.SHARD if one_wire else part.lane, sent.seconds),
        load=min(sent.taken_seconds / sent.seconds, 1.0) if sent.seconds else 0.0,
        launch_seconds=sent.launch_seconds,
        finish_seconds=sent.finish_seconds,
    )

"""Counts the bytes of collectives, on the wire and in memory, from the plan alone.

::

    gather_traffic(plan, param)    Traffic(sent=288, received=..., busiest=..., full=...)     of one parameter, once
    gather_work(plan, param)       bytes of memory traffic to encode, and to decode
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from thunder_zero.plan import layout
from thunder_zero.plan.mesh import OF_MEANS, REPLICATE, SHARD
from thunder_zero.plan.params import Param, Plan


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a collective.

    Attributes:
        sent, received: bytes on the wire of this rank.
        busiest: bytes that rank 0 sends or receives, whichever is more, on all ranks. Rank 0 is the busiest rank, since
            it owns the most rows: it sends most in a gather, receives most in a reduce-scatter, and averages most
            between replicas. Of a bucket that is reduced to owners, the busiest owner's.
        full: bytes of the full, unpadded parameters or gradients.
    """

    sent: int = 0
    received: int = 0
    busiest: int = 0
    full: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.busiest + other.busiest,
            self.full + other.full,
        )


def gather_traffic(plan: Plan, param: Param) -> Traffic:
    """Return the bytes to gather a parameter once."""
    sent, received = _gathered(plan, param, plan.mesh.shard.place)
    return Traffic(sent, received, _gathered(plan, param, 0)[0], param.full_bytes)


def reduce_traffic(plan: Plan, param: Param, *axes: str) -> Traffic:
    """Return the bytes to reduce a parameter's gradient once, over the given axes or by default over all."""
    total = Traffic()
    for axis in axes or plan.reduced_over(param):
        sent, received = _reduced(plan, param, axis, plan.mesh.shard.place)
        total += Traffic(sent, received, max(_reduced(plan, param, axis, 0)), param.grad_bytes)
    return total


def bucket_traffic(plan: Plan, paths: tuple[str, ...], axis: str | None) -> Traffic:
    """Return the bytes to reduce a bucket over an axis, or to gather it (None). Cached, since passes ask often."""
    if (total := plan.known_traffic.get((paths, axis))) is None:
        params = [plan.by_name[path] for path in paths]
        each = (gather_traffic(plan, param) if axis is None else reduce_traffic(plan, param, axis) for param in params)
        total = sum(each, Traffic())
        if axis == SHARD and params[0].owner is not None:  # owners differ, so no rank is the busiest for all
            loads = [[_reduced(plan, param, axis, rank) for param in params] for rank in range(plan.mesh.shard.size)]
            total = replace(total, busiest=max(max(map(sum, zip(*load, strict=True))) for load in loads))
        plan.known_traffic[paths, axis] = total
    return total


def _gathered(plan: Plan, param: Param, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives in a gather."""
    if not param.sharded:
        return 0, 0
    if plan.gathers_bytes(param):
        sent = (plan.mesh.shard.size - 1) * payload_bytes(plan, param)
        return sent, sent
    itemsize = plan.gather_encoding(param).dtype.itemsize
    sent = layout.gather_sends(param.rest_shape, plan.mesh.shard.size, rank)
    return sent * itemsize, (prod(param.rest_shape) - plan.resting(param).numel) * itemsize


def _reduced(plan: Plan, param: Param, axis: str, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives to reduce a gradient over an axis."""
    # A rank sends encoded parts to its peers. Between replicas it also sends back the mean of its own part.
    encoding = plan.reduce_encoding(param, axis)
    if encoding.block:
        sent = (1 + (axis == REPLICATE)) * (plan.ranks_over(axis) - 1) * part_bytes(plan, param, axis)
        return sent, sent
    itemsize = encoding.dtype.itemsize
    if axis == SHARD and param.owner is not None:
        is_owner, peers = rank == param.owner, plan.mesh.shard.size - 1
        return (0, peers * param.grad_bytes) if is_owner else (param.grad_bytes, 0)
    if axis == SHARD and param.sharded:
        received = (plan.mesh.shard.size - 1) * plan.geometry(param).numel_of(rank)
        return layout.scatter_sends(param.shape, plan.mesh.shard.size, rank) * itemsize, received * itemsize
    shape = (plan.geometry(param).numel_of(rank),) if axis in OF_MEANS else param.shape
    sent = layout.all_reduce_sends(shape, plan.ranks_over(axis)) * itemsize
    return sent, sent


def slice_traffic(plan: Plan, collective: str, numel: int, itemsize: int) -> Traffic:
    """Return the bytes of a tensor-parallel collective of ``numel`` elements."""
    ranks = plan.mesh.tensor.size
    sent = {
        "all_reduce": layout.all_reduce_sends((numel,), ranks),
        "all_gather_into_tensor": (ranks - 1) * numel,
        "reduce_scatter_tensor": numel * (ranks - 1) // ranks,
        "all_to_all_single": numel * (ranks - 1) // ranks,
    }
    nbytes = sent.get(collective, 0) * itemsize
    return Traffic(nbytes, nbytes, nbytes)


def payload_bytes(plan: Plan, param: Param) -> int:
    """Return the bytes of a rank's encoded rows with padding. All ranks encode the same number of elements."""
    return plan.gather_encoding(param).nbytes(prod(plan.shard_shape(param)))


def part_bytes(plan: Plan, param: Param, axis: str) -> int:
    """Return the encoded bytes of the part of a gradient that one rank sums. Along ``shard`` the part is the rank's
    rows. Along ``replicate`` each replica sums a part of these rows."""
    rows = prod(plan.shard_shape(param))
    return plan.reduce_encoding(param, axis).nbytes(rows if axis == SHARD else -(-rows // plan.mesh.replicate.size))


def gather_work(plan: Plan, param: Param) -> tuple[int, int]:
    """Return the memory traffic of encoding and of decoding for a gather, in bytes. A cast is an encoding, too."""
    rows, full = prod(plan.shard_shape(param)), plan.mesh.shard.size * prod(plan.shard_shape(param))
    if param.frozen_format:
        return 0, param.rest_bytes + param.full_bytes  # even on a single rank
    if plan.gathers_bytes(param):
        payload = payload_bytes(plan, param)
        decoded = plan.mesh.shard.size * payload + full * param.compute_dtype.itemsize
        return rows * param.dtype.itemsize + payload, decoded
    return (rows * (param.dtype.itemsize + param.compute_dtype.itemsize), 0) if plan.casts(param) else (0, 0)


def reduce_work(plan: Plan, param: Param, axis: str) -> tuple[int, int]:
    """Return the memory traffic of encoding and of decoding for a reduction over an axis, in bytes."""
    # Each encoded part is written once and summed once. Between replicas the sum is encoded again, for all ranks.
    rows, peers = prod(plan.shard_shape(param)), plan.ranks_over(axis) - 1
    mean = rows * param.dtype.itemsize
    numel = prod(plan.geometry(param).in_compute) if axis == plan.reduced_over(param)[0] else rows
    weighed = 2 * numel * param.reduce_dtype.itemsize * plan.weighs_gradient(param, axis)
    if plan.reduces_bytes(param, axis):
        part = part_bytes(plan, param, axis)
        if axis == SHARD:
            encoded = (peers + 1) * rows * param.compute_dtype.itemsize + peers * part
            return weighed + encoded, peers * part + mean
        return mean + peers * part, (2 * peers + 2) * part + mean
    cast = numel * (param.compute_dtype.itemsize + param.reduce_dtype.itemsize)
    is_cast = axis == plan.reduced_over(param)[-1] and param.reduce_dtype is not param.dtype
    uncast = rows * param.reduce_dtype.itemsize + mean
    return weighed + cast * plan.casts_gradient(param, axis), uncast * is_cast

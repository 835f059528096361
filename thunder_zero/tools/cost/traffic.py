"""Counts the bytes that an operation reads and writes in memory; finds the dtype of its products."""

from __future__ import annotations

from math import prod

from thunder_zero.amounts import itemsize, name_of
from thunder_zero.schedule.timeline import Kind, Op, Timeline, Work


def traffic_bytes(op: Op, timeline: Timeline) -> int:
    """Bytes that a computation reads and writes; 0 of views, and of all that is not COMPUTE.

    Each tensor is read once, no more than the memory that it views (an expanded one), and of tensors that are indexed
    no more than is written (an embedding's rows). A fused region has its inputs and outputs.
    """
    if op.kind is not Kind.COMPUTE or op.work in (Work.NONE, Work.VIEW):
        return 0
    written = sum(timeline.nbytes(name) for name in op.updates or op.writes)
    read = [read_bytes(name, timeline) for name in dict.fromkeys(op.reads) if name not in op.updates]
    if op.work is Work.INDEX:
        read = [min(nbytes, written) for nbytes in read]
    return written + sum(read)


def read_bytes(name: str, timeline: Timeline) -> int:
    """Bytes of a value that is read once: no more than the memory that it views."""
    return min(timeline.nbytes(name), timeline.nbytes(timeline.memory(name)) or timeline.nbytes(name))


def cast_bytes(op: Op, timeline: Timeline) -> int:
    """Bytes that a launch reads and writes to cast shards, or gradients, to the dtype in which they travel."""
    total = 0
    for name, param in zip(op.reads, timeline.params_of(op), strict=True):
        sends, value = timeline.travels_in(op, param), timeline.values.get(name)
        has = value.dtype if value is not None else ""
        if has and has != name_of(sends):
            shape = timeline.plan.shard_shape(param) if op.kind is Kind.GATHER else param.shape
            total += prod(shape) * (itemsize(has) + sends.itemsize)
    return total


def compute_dtype(op: Op, timeline: Timeline) -> str:
    """The dtype of an operation's products: that of the first floating-point tensor that it reads, or of the first
    tensor; "" if it reads none."""
    dtypes = [timeline.values[name].dtype for name in op.reads if name in timeline.values]
    return next((dtype for dtype in dtypes if "float" in dtype), next(iter(dtypes), ""))

"""When values live: where memory is last needed, and how many bytes are alive at once.

In: a timeline. Out: indices of its operations, or bytes at each of them. :func:`last_uses` walks over the operations;
its callers say which memory a value is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline


def last_uses(ops: Iterable[Op], holds: Callable[[str], Iterable[str]]) -> dict[str, int]:
    """Return, for each memory, the index of the last operation that reads or writes a value in it. A FREE does neither.

    Args:
        ops: the operations.
        holds: returns the memory that a value may be in, such as the values of which it may be a view.
    """
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        for name in (*op.reads, *op.writes) if op.kind is not Kind.FREE else ():
            for memory in holds(name):
                last[memory] = index
    return last


def last_reads(timeline: Timeline, made_from: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return, for each gathered parameter (value), the last index that needs it, or a possible view of it."""
    return last_uses(timeline.ops, lambda name: made_from.get(name, ()))


def lifetimes(timeline: Timeline, stop: int | None = None) -> dict[str, range]:
    """Return, for each memory that operations write, the indices where it is alive, up to ``stop``.

    A life goes from the operation that writes the memory to the last one that reads it or a view of it. A gathered
    parameter, or a reduced gradient, lives from the launch of its collective. The gradients that a reduction reads live
    until its wait. The caller drops what forward returns.
    """
    launched = {op.writes[0]: index for index, op in enumerate(timeline.ops) if op.kind in LAUNCHES}
    forward = {timeline.memory(name) for op in timeline.ops[: timeline.backward_start] for name in op.writes}
    *ops, end = (
        replace(op, reads=timeline.launches[op.reads[0]].reads) if op.kind is Kind.WAIT else op for op in timeline.ops
    )
    end = replace(end, reads=tuple(name for name in end.reads if timeline.memory(name) not in forward))
    last = last_uses([*ops, end][:stop], lambda name: (timeline.memory(name),))
    return {
        name: range(launched[op.reads[0]] if op.kind is Kind.WAIT else index, last[name] + 1)
        for index, op in enumerate(timeline.ops[:stop])
        if op.kind not in LAUNCHES
        if not (timeline.ends(op, Kind.GATHER) and timeline.params_of(op)[0].resident)
        for name in op.writes
        if timeline.memory(name) == name
    }


def bytes_alive(timeline: Timeline, lives: Mapping[str, range]) -> tuple[int, ...]:
    """Return the bytes that are alive at each index of a timeline, given the lives of memory."""
    changes = [0] * (len(timeline.ops) + 1)
    for memory, life in lives.items():
        changes[life.start] += timeline.nbytes(memory)
        changes[life.stop] -= timeline.nbytes(memory)
    return tuple(accumulate(changes[:-1]))


def alive_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Estimate the bytes alive while each operation runs, to compare schedules. ``tz.tools.memory`` has the exact
    number. This one leaves out what exists before the step, the loss, the buffers of transports, and what an operation
    allocates and frees by itself."""
    return bytes_alive(timeline, lifetimes(timeline))


def gathered_bytes(timeline: Timeline, unit: str | None = None) -> tuple[int, ...]:
    """Return the bytes of gathered parameters that are alive after each operation: of all units, or of one.

    A gathered parameter occupies its full bytes from the launch of its gather, where the buffer is allocated, to its
    FREE. Resident parameters (ZeRO-1: sharded, but full at rest) do not count. If the collectives of a backend send
    chunks of one size (NCCL), a parameter whose rows W does not divide takes up to W - 1 rows more. Parameters that an
    accumulation keeps unsharded (``policy.reshard_after_backward=False``) stay after the step, and do not count then.
    """

    def change(op: Op) -> int:
        params = [param for param in timeline.params_of(op) if not param.resident and unit in (None, param.unit)]
        full = sum(param.full_bytes for param in params)
        return full if op.kind is Kind.GATHER else -full if op.kind is Kind.FREE else 0

    return tuple(accumulate(map(change, timeline.ops)))

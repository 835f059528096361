"""Finds when memory is alive: its last use, and the bytes alive at each operation.

In: a timeline. Out: indices of its operations, or bytes at each operation. :func:`last_uses` walks over the operations.
Its callers map values to memories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from thunder_zero.schedule.ops import Free, Gather, Launch, Op, Return, Wait, ends
from thunder_zero.schedule.timeline import Timeline


def _uses(op: Op) -> Iterable[str]:
    """Return the values that an operation reads or writes. To free a value is not a use."""
    return () if isinstance(op, Free) else (*op.reads, *op.writes)


def last_uses(
    ops: Iterable[Op], memories_of: Callable[[str], Iterable[str]], uses: Callable[[Op], Iterable[str]] = _uses
) -> dict[str, int]:
    """Return a mapping from memories to the index of their last use."""
    last: dict[str, int] = {}
    for index, op in enumerate(ops):
        for name in uses(op):
            for memory in memories_of(name):
                last[memory] = index
    return last


def last_reads(timeline: Timeline, made_from: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return a mapping from gathered parameters (values) to the index of their last read, views included."""
    return last_uses(timeline.ops, lambda name: made_from.get(name, ()))


def lifetimes(timeline: Timeline, stop: int | None = None) -> dict[str, range]:
    """Return a mapping from memories, except inputs, to the indices where they are alive, up to ``stop``.

    Memory is alive from the operation that writes it to the last operation that reads it or a view of it. A gathered
    parameter, or a reduced gradient, is alive from the launch of its collective. The gradients that a reduction reads
    are alive until its wait. Forward's return keeps nothing alive: the caller may drop the outputs.
    """
    launched = {op.handle: index for index, op in enumerate(timeline.ops) if isinstance(op, Launch)}
    forward = {timeline.memory(name) for op in timeline.ops[: timeline.backward_start] for name in op.writes}

    def uses(op: Op) -> Iterable[str]:
        match op:
            case Return():
                return (name for name in op.reads if timeline.memory(name) not in forward)
            case Wait():
                return (*op.launch.reads, *op.writes)
        return _uses(op)

    last = last_uses(timeline.ops[:stop], lambda name: (timeline.memory(name),), uses)
    return {
        name: range(launched[op.launch.handle] if isinstance(op, Wait) else index, last[name] + 1)
        for index, op in enumerate(timeline.ops[:stop])
        if not isinstance(op, Launch)
        if not (ends(op, Gather) and timeline.params_of(op)[0].resident)
        for name in op.writes
        if timeline.memory(name) == name
    }


def bytes_alive(timeline: Timeline, lives: Mapping[str, range]) -> tuple[int, ...]:
    """Return the bytes that are alive at each index of a timeline, given the lifetimes of memory."""
    changes = [0] * (len(timeline.ops) + 1)
    for memory, life in lives.items():
        changes[life.start] += timeline.nbytes(memory)
        changes[life.stop] -= timeline.nbytes(memory)
    return tuple(accumulate(changes[:-1]))


def gathered_bytes(timeline: Timeline, unit: str | None = None) -> tuple[int, ...]:
    """Return the bytes of gathered parameters that are alive after each operation, in all units or in ``unit``.

    A gathered parameter occupies its full bytes from the launch of its gather, where the buffer is allocated, to its
    FREE. Resident parameters (ZeRO-1: sharded, but full at rest) are not included. If a backend sends chunks of equal
    size (NCCL), a parameter is padded to a multiple of W rows. Parameters that stay gathered after the step
    (``policy.reshard_after_backward=False``) are included only up to their FREE.
    """

    def change(op: Op) -> int:
        if not isinstance(op, Gather | Free):
            return 0
        params = [param for param in timeline.params_of(op) if not param.resident and unit in (None, param.unit)]
        full = sum(param.full_bytes for param in params)
        return full if isinstance(op, Gather) else -full

    return tuple(accumulate(map(change, timeline.ops)))

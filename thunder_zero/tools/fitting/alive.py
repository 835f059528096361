"""Estimates the bytes alive at each operation of a timeline, to compare schedules.

Memory is alive from the operation that writes it to the last one that reads it or a view of it, and with collectives
from the launch to the wait: the buffer of a gathered parameter or of a reduced gradient, and the gradients that a
reduction reads. What is there before the step counts nothing, nor do the loss, buffers of transports, and what an
operation allocates and frees by itself: ``tz.tools.memory`` has all of it.
"""

from __future__ import annotations

from itertools import accumulate

from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline


def alive_bytes(timeline: Timeline) -> tuple[int, ...]:
    """Bytes alive while each operation runs."""
    born, last = lifetimes(timeline)
    changes = [0] * (len(timeline.ops) + 1)
    for memory, at in born.items():
        changes[at] += timeline.nbytes(memory)
        changes[last[memory] + 1] -= timeline.nbytes(memory)
    return tuple(accumulate(changes[:-1]))


def lifetimes(timeline: Timeline) -> tuple[dict[str, int], dict[str, int]]:
    """For each memory that operations write: the position where it is allocated, and the last where it is needed."""
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    launched = {op.writes[0]: at for at, op in enumerate(timeline.ops) if op.kind in LAUNCHES}
    resident = {path for path, param in timeline.plan.by_name.items() if param.resident}
    for at, op in enumerate(timeline.ops):
        start = launched[op.reads[0]] if op.kind is Kind.WAIT else at
        for name in op.writes if op.kind not in LAUNCHES else ():
            if timeline.memory(name) == name and not (timeline.ends(op, Kind.GATHER) and op.params[0] in resident):
                born[name] = start
                last[name] = at
        needed = op.reads
        if op.kind is Kind.FREE:
            needed = ()
        elif op.kind is Kind.WAIT:
            needed = timeline.launches[op.reads[0]].reads
        for name in needed:
            memory = timeline.memory(name)
            is_output = at == len(timeline.ops) - 1 and born.get(memory, at) < timeline.border  # the caller drops it
            if memory in born and not is_output:
                last[memory] = at
    return born, last

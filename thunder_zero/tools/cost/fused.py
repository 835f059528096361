"""Counts the traffic of a step whose pointwise lines are fused, as nvFuser or inductor would.

Traces of a run on CPUs have such lines one by one. Here those that no product, attention or collective lies between are
one kernel: it reads each value from outside once, and writes what somebody outside reads. Depth is the number of
kernels of other kinds that a line must come after; a line that may come later is as deep as what reads it first. What
is no line of a trace (a loss, an optimizer) runs operator by operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from thunder_zero.schedule.timeline import Kind, Op, Timeline, Work
from thunder_zero.tools.cost.traffic import read_bytes, traffic_bytes

FREE = frozenset({Work.VIEW, Work.NONE})
FUSED = FREE | {Work.POINTWISE, Work.REDUCTION}


def fused_traffic(timeline: Timeline) -> tuple[int, ...]:
    """Bytes that each operation reads and writes; those of a fused kernel are at its last line."""
    kernels, stored = _kernels(timeline), _stored_in(timeline)
    inside = {at: number for number, members in enumerate(kernels) for at in members}
    readers = _readers(timeline)
    found = [0 if at in inside else traffic_bytes(op, timeline) for at, op in enumerate(timeline.ops)]
    for number, members in enumerate(kernels):
        ops = [timeline.ops[at] for at in members]
        written = [name for op in ops for name in op.writes]
        needed = {stored[name] for name in written if any(inside.get(reader) != number for reader in readers[name])}
        found[members[-1]] = _traffic(ops, needed, stored, timeline)
    return tuple(found)


def _traffic(ops: Sequence[Op], needed: set[str], stored: Mapping[str, str], timeline: Timeline) -> int:
    """Of one kernel: what it reads from outside, and what it makes that others need. Views are free."""
    computing = [op for op in ops if op.work not in FREE]
    made = {stored[name] for op in computing for name in op.writes}
    read = {stored.get(name, name): name for op in computing for name in op.reads}
    from_outside = sum(read_bytes(name, timeline) for memory, name in read.items() if memory not in made)
    return from_outside + sum(map(timeline.nbytes, made & needed))


def _stored_in(timeline: Timeline) -> dict[str, str]:
    """The value whose memory each value is in; what has the work of a view is in that of what it reads, as
    :func:`thunder_zero.tools.cost.traffic.traffic_bytes` has it."""
    stored: dict[str, str] = {}
    for op in timeline.ops:
        for name in op.writes:
            seen = op.reads[0] if op.work is Work.VIEW and op.reads else timeline.memory(name)
            stored[name] = stored.get(seen, timeline.memory(seen)) if seen != name else name
    return stored


def _is_fused(op: Op) -> bool:
    return op.kind is Kind.COMPUTE and op.work in FUSED and not op.updates and bool(op.source)


def _readers(timeline: Timeline) -> defaultdict[str, list[int]]:
    """The positions that read each value; those that free it do not."""
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for at, op in enumerate(timeline.ops):
        for name in op.reads if op.kind is not Kind.FREE else ():
            readers[name].append(at)
    return readers


def _kernels(timeline: Timeline) -> list[list[int]]:
    """The positions of each fused kernel: lines of one half and depth that are connected by values."""
    depths = _depths(timeline)
    of: dict[int, int] = {}  # position -> one of its kernel, the root of a tree

    def root(at: int) -> int:
        while of[at] != at:
            at = of[at]
        return at

    written: dict[str, int] = {}
    for at, op in enumerate(timeline.ops[:-1]):
        if not _is_fused(op):
            continue
        of[at] = at
        for name in op.reads:
            before = written.get(name)
            if before is not None and depths[before] == depths[at] and timeline.ops[before].backward is op.backward:
                of[root(before)] = at
        written.update(dict.fromkeys(op.writes, at))
    kernels: defaultdict[int, list[int]] = defaultdict(list)
    for at in of:
        kernels[root(at)].append(at)
    return list(kernels.values())


def _depths(timeline: Timeline) -> list[int]:
    """The depth of each operation in its half."""
    depths = [0] * len(timeline.ops)
    of: dict[str, int] = {}
    for at, op in enumerate(timeline.ops):
        if at == timeline.border:
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

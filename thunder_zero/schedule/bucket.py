"""Merges the gathers, and the reductions, of one unit into buckets that travel together.

Gathers of one unit with no gather of another unit between them start together, in the place of the first; reductions of
one unit start together, in the place of the last::

    gather fut0 <- t_w    w                 gather fut0 <- t_w, t_b    w b
    wait   w    <- fut0   w                 wait   w, b <- fut0        w b
    compute ...                      -->    compute ...
    gather fut1 <- t_b    b                 compute ...
    wait   b    <- fut1   b
    compute ...

A bucket has one dtype, one kind of collective and at most ``Sizes.bucket_bytes`` of full parameters, or holds a single
parameter. Copies (``Op.repeated``) travel with copies only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from thunder_zero.schedule.timeline import Kind, Op, Timeline


def bucket(timeline: Timeline) -> Timeline:
    """Merges gathers, then reductions, by unit, dtype and bytes."""
    timeline = _merged(timeline, _gather_buckets(timeline), place=0)
    buckets = _reduce_buckets(timeline)
    return _merged(timeline, [*buckets, *_continued(timeline, buckets)], place=-1)


class _Open:
    """Collects buckets; those of the unit that gathers (or reduces) now may still grow."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.done: list[list[int]] = []  # positions of the members
        self.run: Hashable = None
        self.current: dict[Hashable, list[int]] = {}
        self.nbytes: dict[Hashable, int] = {}

    def add(self, at: int, nbytes: int, run: Hashable, kind: Hashable, *, may_join: bool = True) -> None:
        """Put the launch at position ``at`` into the open bucket of its run and kind, or into a new one."""
        if run != self.run:
            self.run, self.current = run, {}
        fits = kind in self.current and 0 < self.nbytes[kind] + nbytes <= self.bucket_bytes
        if not (fits and may_join):
            self.done.append([])
            self.current[kind], self.nbytes[kind] = self.done[-1], 0
        self.current[kind].append(at)
        self.nbytes[kind] += nbytes

    def first(self, kind: Hashable) -> int:
        """Position of the first launch in the open bucket of this kind; -1 if there is none."""
        return self.current[kind][0] if kind in self.current else -1

    def close(self, members: Iterable[int]) -> None:
        gone = set(members)
        self.current = {kind: ats for kind, ats in self.current.items() if gone.isdisjoint(ats)}


def _gather_buckets(timeline: Timeline) -> list[list[int]]:
    buckets = _Open(timeline.plan.sizes.bucket_bytes)
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.GATHER:
            (param,) = timeline.params_of(op)
            kind = (_dtypes(timeline, op), op.repeated, param.resident)
            is_written = all(timeline.writer.get(read, -1) < buckets.first(kind) for read in op.reads)
            buckets.add(at, param.full_bytes, (param.unit, op.backward), kind, may_join=is_written)
    return buckets.done


def _reduce_buckets(timeline: Timeline) -> list[list[int]]:
    plan = timeline.plan
    buckets = _Open(plan.sizes.bucket_bytes)
    reduced: dict[str, int] = {}  # handle or reduced gradient -> position of its launch
    for at, op in enumerate(timeline.ops):
        if timeline.continues(op):
            reduced[op.writes[0]] = reduced[op.reads[0]]
        elif op.kind is Kind.REDUCE:
            (param,) = timeline.params_of(op)
            later = tuple((over, plan.reduce_encoding(param, over)) for over in plan.reduced_over(param)[1:])
            buckets.add(at, param.grad_bytes, param.unit, (_dtypes(timeline, op), later, param.sharded))
            reduced[op.writes[0]] = at
        elif timeline.ends(op, Kind.REDUCE):
            reduced[op.writes[0]] = reduced[op.reads[0]]
        elif readers := [reduced[read] for read in op.reads if read in reduced]:
            buckets.close(readers)  # a launch that joined later would delay this reader
    return buckets.done


def _continued(timeline: Timeline, buckets: Sequence[Sequence[int]]) -> list[list[int]]:
    """The buckets of the reductions that read the means of these, where there are any."""
    wait_of = {op.reads[0]: op for op in timeline.ops if op.kind is Kind.WAIT}
    reader = {op.reads[0]: at for at, op in enumerate(timeline.ops) if timeline.continues(op)}
    means = [[wait_of[timeline.ops[at].writes[0]].writes[0] for at in members] for members in buckets]
    return [[reader[name] for name in names] for names in means if names[0] in reader]


def _merged(timeline: Timeline, buckets: Sequence[Sequence[int]], *, place: int) -> Timeline:
    """One launch and one wait for each bucket, in the places of those of member ``place`` (0 or -1)."""
    ops = timeline.ops
    wait_of = {op.reads[0]: at for at, op in enumerate(ops) if op.kind is Kind.WAIT}
    values = dict(timeline.values)
    merged: dict[int, Op] = {}
    gone: set[int] = set()
    for members in buckets:
        if len(members) == 1:
            continue
        launches = [ops[at] for at in members]
        waits = [wait_of[launch.writes[0]] for launch in launches]
        handle = launches[0].writes[0]
        values[handle] = replace(values[handle], nbytes=sum(values[launch.writes[0]].nbytes for launch in launches))
        merged[members[place]] = replace(_concatenated(launches), writes=(handle,))
        merged[waits[place]] = replace(_concatenated([ops[at] for at in waits]), reads=(handle,))
        gone.update(members, waits)
    left = (merged.get(at, op) for at, op in enumerate(ops) if at in merged or at not in gone)
    return timeline.with_ops(left, values)


def _concatenated(members: Sequence[Op]) -> Op:
    return replace(
        members[0],
        reads=tuple(name for op in members for name in op.reads),
        writes=tuple(name for op in members for name in op.writes),
        params=tuple(path for op in members for path in op.params),
        source=tuple(position for op in members for position in op.source),
    )


def _dtypes(timeline: Timeline, op: Op) -> Hashable:
    """The dtype that a launch reads, and how it travels."""
    return timeline.values[op.reads[0]].dtype, timeline.travels_as(op, timeline.params_of(op)[0])

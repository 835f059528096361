"""Merges the gathers, and the reductions, of one unit into buckets: one collective each.

Gathers of one unit start together, at the start of the first gather, unless a gather of another unit is between them.
Reductions of one unit start together, at the start of the last reduction::

    gather fut0 <- t_w    w                 gather fut0 <- t_w, t_b    w b
    wait   w    <- fut0   w                 wait   w, b <- fut0        w b
    compute ...                      -->    compute ...
    gather fut1 <- t_b    b                 compute ...
    wait   b    <- fut1   b
    compute ...

A bucket has one dtype, one kind of collective and at most ``Sizes.bucket_bytes`` of full parameters. A larger parameter
is a bucket by itself. Repeated gathers have buckets of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from thunder_zero.schedule.ops import Gather, Launch, Op, Reduce, Wait, ends
from thunder_zero.schedule.timeline import Timeline


def bucket(timeline: Timeline) -> Timeline:
    """Merge the gathers of each unit, then the reductions, into buckets of one dtype and limited bytes."""
    timeline = _merge(timeline, _gather_buckets(timeline), place=0)
    buckets = _reduce_buckets(timeline)
    return _merge(timeline, [*buckets, *_buckets_of_means(timeline, buckets)], place=-1)


class _OpenBuckets:
    """Buckets that are being filled. Only buckets of the latest unit are open."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.done: list[list[int]] = []  # for each bucket, the indices of its launches
        self.run: Hashable = None
        self.current: dict[Hashable, list[int]] = {}
        self.nbytes: dict[Hashable, int] = {}

    def add(self, index: int, nbytes: int, run: Hashable, kind: Hashable, *, may_join: bool = True) -> None:
        """Put the launch at ``index`` into the open bucket of its run and kind, or into a new bucket."""
        if run != self.run:
            self.run, self.current = run, {}
        fits = kind in self.current and 0 < self.nbytes[kind] + nbytes <= self.bucket_bytes
        if not (fits and may_join):
            self.done.append([])
            self.current[kind], self.nbytes[kind] = self.done[-1], 0
        self.current[kind].append(index)
        self.nbytes[kind] += nbytes

    def first(self, kind: Hashable) -> int:
        """Return the index of the first launch in the open bucket of this kind; -1 if there is none."""
        return self.current[kind][0] if kind in self.current else -1

    def close(self, launches: Iterable[int]) -> None:
        """Close the open buckets that contain any of these launches."""
        closed = set(launches)
        self.current = {kind: members for kind, members in self.current.items() if closed.isdisjoint(members)}


def _gather_buckets(timeline: Timeline) -> list[list[int]]:
    buckets = _OpenBuckets(timeline.plan.sizes.bucket_bytes)
    for index, op in enumerate(timeline.ops):
        if isinstance(op, Gather):
            (param,) = timeline.params_of(op)
            kind = (_dtypes(timeline, op), op.repeated, param.resident)
            is_written = all(timeline.writer.get(read, -1) < buckets.first(kind) for read in op.reads)
            buckets.add(index, param.full_bytes, (param.unit, op.backward), kind, may_join=is_written)
    return buckets.done


def _reduce_buckets(timeline: Timeline) -> list[list[int]]:
    plan = timeline.plan
    buckets = _OpenBuckets(plan.sizes.bucket_bytes)
    reduced: dict[str, int] = {}  # handle or reduced gradient -> index of its launch
    for index, op in enumerate(timeline.ops):
        if timeline.is_second_reduction(op):
            reduced[op.writes[0]] = reduced[op.reads[0]]
        elif isinstance(op, Reduce):
            (param,) = timeline.params_of(op)
            later_axes = tuple((axis, plan.reduce_encoding(param, axis)) for axis in plan.reduced_over(param)[1:])
            kind = _dtypes(timeline, op), later_axes, param.sharded, param.owner is None
            buckets.add(index, param.grad_bytes, param.unit, kind)
            reduced[op.writes[0]] = index
        elif ends(op, Reduce):
            reduced[op.writes[0]] = reduced[op.reads[0]]
        elif readers := [reduced[read] for read in op.reads if read in reduced]:
            buckets.close(readers)  # a launch that joined later would delay this reader
    return buckets.done


def _buckets_of_means(timeline: Timeline, buckets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the buckets of the reductions that read the means of the given buckets."""
    wait_of = {op.launch.handle: op for op in timeline.ops if isinstance(op, Wait)}
    reader = {op.reads[0]: index for index, op in enumerate(timeline.ops) if timeline.is_second_reduction(op)}
    means = [[wait_of[timeline.ops[index].writes[0]].writes[0] for index in members] for members in buckets]
    return [[reader[name] for name in names] for names in means if names[0] in reader]


def _merge(timeline: Timeline, buckets: Sequence[Sequence[int]], *, place: int) -> Timeline:
    """Merge the launches of each bucket, and their waits, at the index of its first (0) or last (-1) member."""
    ops = timeline.ops
    wait_of = {op.launch.handle: index for index, op in enumerate(ops) if isinstance(op, Wait)}
    values = dict(timeline.values)
    merged: dict[int, Op] = {}
    replaced: set[int] = set()
    for members in buckets:
        if len(members) == 1:
            continue
        launches = [op for index in members if isinstance(op := ops[index], Launch)]
        waits = [wait_of[launch.handle] for launch in launches]
        first = launches[0]
        values[first.handle] = replace(
            values[first.handle], nbytes=sum(values[launch.handle].nbytes for launch in launches)
        )
        reads = tuple(name for launch in launches for name in launch.reads)
        launch = replace(first, reads=reads, params=tuple(path for launch in launches for path in launch.params))
        merged[members[place]] = launch
        merged[waits[place]] = Wait(launch, tuple(name for index in waits for name in ops[index].writes))
        replaced.update(members, waits)
    ops_left = (merged.get(index, op) for index, op in enumerate(ops) if index in merged or index not in replaced)
    return timeline.with_ops(ops_left, values)


def _dtypes(timeline: Timeline, op: Launch) -> Hashable:
    """Return the dtype that a launch reads, and the encoding in which it sends."""
    return timeline.values[op.reads[0]].dtype, timeline.travels_as(op, timeline.params_of(op)[0])

"""What travels together.

Gathers of one unit that follow each other, with no gather of another unit between, travel together from where the
first one stood; reductions of one unit together from where the last one stood::

    gather fut0 <- t_w    w                 gather fut0 <- t_w, t_b    w b
    wait   w    <- fut0   w                 wait   w, b <- fut0        w b
    compute ...                      -->    compute ...
    gather fut1 <- t_b    b                 compute ...
    wait   b    <- fut1   b
    compute ...

One bucket has one dtype and one kind of collective, and at most ``policy.bucket_bytes`` of full parameters unless
it is a single one. Copies (``again``) travel with copies only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from thunder_zero.schedule.timeline import Kind, Op, Timeline


def bucket(timeline: Timeline) -> Timeline:
    """Merges gathers, then reductions, by unit, dtype and bytes."""
    timeline = _merged(timeline, _gather_buckets(timeline), stands_at=0)
    return _merged(timeline, _reduce_buckets(timeline), stands_at=-1)


class _Open:
    """The buckets that may still grow: those of the current run of one unit."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.done: list[list[int]] = []  # positions of the members
        self.run: Hashable = None
        self.current: dict[Hashable, list[int]] = {}
        self.nbytes: dict[Hashable, int] = {}

    def add(self, at: int, nbytes: int, run: Hashable, kind: Hashable, *, may_join: bool = True) -> None:
        """Put the launch at position ``at`` into a bucket: one of its own run and kind, or a new one."""
        if run != self.run:
            self.run, self.current = run, {}
        fits = kind in self.current and 0 < self.nbytes[kind] + nbytes <= self.bucket_bytes
        if not (fits and may_join):
            self.done.append([])
            self.current[kind], self.nbytes[kind] = self.done[-1], 0
        self.current[kind].append(at)
        self.nbytes[kind] += nbytes

    def first(self, kind: Hashable) -> int:
        """Position of the first member of the bucket of this kind that is open; -1 without any."""
        return self.current[kind][0] if kind in self.current else -1

    def close(self, members: Iterable[int]) -> None:
        """Let nothing further join the buckets that hold one of these launches."""
        gone = set(members)
        self.current = {kind: ats for kind, ats in self.current.items() if gone.isdisjoint(ats)}


def _gather_buckets(timeline: Timeline) -> list[list[int]]:
    buckets = _Open(timeline.plan.policy.bucket_bytes)
    written: dict[str, int] = {}
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.GATHER:
            (param,) = timeline.params_of(op)
            kind = (_dtypes(timeline, op), op.again, param.resident)
            there = all(written.get(read, -1) < buckets.first(kind) for read in op.reads)
            buckets.add(at, param.full_bytes, (param.unit, op.backward), kind, may_join=there)
        written.update(dict.fromkeys(op.writes, at))
    return buckets.done


def _reduce_buckets(timeline: Timeline) -> list[list[int]]:
    buckets = _Open(timeline.plan.policy.bucket_bytes)
    reduced: dict[str, int] = {}  # handle or reduced gradient -> position of its launch
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.REDUCE:
            (param,) = timeline.params_of(op)
            buckets.add(at, param.grad_bytes, param.unit, (_dtypes(timeline, op), param.sharded))
            reduced[op.writes[0]] = at
        elif timeline.ends(op, Kind.REDUCE):
            reduced[op.writes[0]] = reduced[op.reads[0]]
        elif readers := [reduced[read] for read in op.reads if read in reduced]:
            buckets.close(readers)  # whatever joined would make this reader wait
    return buckets.done


def _merged(timeline: Timeline, buckets: Sequence[Sequence[int]], *, stands_at: int) -> Timeline:
    """Each bucket's launches and waits as one, where those of member ``stands_at`` (0 or -1) stand."""
    ops = timeline.ops
    wait_of = {op.reads[0]: at for at, op in enumerate(ops) if op.kind is Kind.WAIT}
    values = dict(timeline.values)
    stands: dict[int, Op] = {}
    gone: set[int] = set()
    for members in buckets:
        if len(members) == 1:
            continue
        launches = [ops[at] for at in members]
        waits = [wait_of[launch.writes[0]] for launch in launches]
        handle = launches[0].writes[0]
        values[handle] = replace(values[handle], nbytes=sum(values[launch.writes[0]].nbytes for launch in launches))
        stands[members[stands_at]] = replace(_concatenated(launches), writes=(handle,))
        stands[waits[stands_at]] = replace(_concatenated([ops[at] for at in waits]), reads=(handle,))
        gone.update(members, waits)
    left = (stands.get(at, op) for at, op in enumerate(ops) if at in stands or at not in gone)
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
    """In which dtype a launch reads, and in which it travels."""
    return timeline.values[op.reads[0]].dtype, timeline.travels_in(op, timeline.params_of(op)[0])

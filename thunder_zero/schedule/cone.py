"""Finds the cone: the values that depend on parameters alone.

::

    gather  fut <- t_w
    wait    w   <- fut        in the cone
    compute wt  <- w          in the cone, if repeatable
    compute c   <-            not in the cone: a constant, which the cone may read
    compute wc  <- wt, c      in the cone
    compute y   <- x, wc      not in the cone: it depends on data too
    compute c   <- t_v        in the cone, if it casts a replicated parameter

Saving a value of the cone for backward is as good as saving the parameter itself, and a value of the cone may be a view
of the gathered buffer. So a pass that frees parameters or gathers them again starts from the cone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from thunder_zero.schedule.timeline import Kind, Op, Timeline


def cone(timeline: Timeline) -> dict[str, int]:
    """The values of the cone, each with the position of the operation that writes it."""
    inside: dict[str, int] = {}
    without_data = set(timeline.replicated)  # the cone, and constants
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.COMPUTE:
            if not op.repeatable or not without_data.issuperset(op.reads):
                continue
            is_inside = not inside.keys().isdisjoint(op.reads) or not timeline.cast.isdisjoint(op.reads)
        elif timeline.ends(op, Kind.GATHER):
            is_inside = True
        else:
            continue
        without_data.update(op.writes)
        if is_inside:
            inside.update(dict.fromkeys(op.writes, at))
    return inside


def regathered(timeline: Timeline, inside: Mapping[str, int]) -> dict[str, int]:
    """The values of the cone ``inside`` that backward must not read from forward, each with the position of its writer.

    They depend on a parameter that is gathered again, or on the cast copy of a replicated one. Includes the handles of
    the gathers.
    """
    found: dict[str, int] = {}
    for at, op in enumerate(timeline.ops):
        if op.kind is Kind.GATHER:
            writes = op.writes if any(not param.gathered_once for param in timeline.params_of(op)) else ()
        elif timeline.ends(op, Kind.GATHER):
            params = timeline.params_of(op)
            writes = tuple(name for name, param in zip(op.writes, params, strict=True) if not param.gathered_once)
        else:
            writes = () if found.keys().isdisjoint(op.reads) and timeline.cast.isdisjoint(op.reads) else op.writes
        found.update((name, at) for name in writes if name in inside or op.kind is Kind.GATHER)
    return found


def needed_again(timeline: Timeline, chain: Mapping[str, int]) -> set[str]:
    """The values of ``chain``, forward's cone, that backward needs: those that it reads, and those they come from."""
    needed: set[str] = set()
    reads = [read for op in timeline.ops[:-1] if op.backward for read in op.reads]
    while reads:
        name = reads.pop()
        if name in chain and name not in needed:
            needed.add(name)
            reads += timeline.ops[chain[name]].reads
    return needed


def last_reads(timeline: Timeline, inside: Mapping[str, int]) -> dict[str, int]:
    """For each value of the cone ``inside``, the last position where its memory is still needed.

    That is the last read of the value, or of any value of the cone that depends on it and so may be a view of it. For a
    value that nothing reads, it is the position of its writer. A FREE is not a read.
    """
    last = dict(inside)
    for at in range(len(timeline.ops) - 1, -1, -1):
        op = timeline.ops[at]
        if op.kind is Kind.FREE:
            continue
        if inside.keys().isdisjoint(op.reads):
            continue
        until = max((last[name] for name in op.writes if name in inside), default=at)
        for read in op.reads:
            if read in inside:
                last[read] = max(last[read], until)
    return last


def returned(timeline: Timeline, inside: Mapping[str, int]) -> set[str]:
    """The values of the cone ``inside`` that escape: a return reads them, or a value that depends on them."""
    found: set[str] = set()
    for op in reversed(timeline.ops):
        if op.kind is Kind.COMPUTE and (not op.writes or not found.isdisjoint(op.writes)):
            found.update(read for read in op.reads if read in inside)
    return found


def frees_of_gathered(timeline: Timeline) -> Timeline:
    """Turns the ``del`` lines of a trace (FREEs of any values, without params) into FREEs of gathered parameters.

    A gathered parameter is freed where the last name of its memory is deleted: its own, or that of a possible view.
    Drops other deletions, and those of resident parameters.
    """
    inside = cone(timeline)
    holds: dict[str, frozenset[tuple[str, str]]] = {}  # value -> (gathered value, path) whose memory it may share
    for name, at in inside.items():
        op = timeline.ops[at]
        if op.kind is Kind.WAIT:
            holds[name] = frozenset({(name, op.params[op.writes.index(name)])})
        else:
            holds[name] = frozenset[tuple[str, str]]().union(*(holds.get(read, frozenset()) for read in op.reads))
    holders = Counter(gathered for held in holds.values() for gathered in held)
    order = {param.path: number for number, param in enumerate(timeline.plan.params)}  # values' names are no order
    ops: list[Op] = []
    for op in timeline.ops:
        if op.kind is not Kind.FREE:
            ops.append(op)
            continue
        gathered_by = [sorted(holds.get(name, ()), key=lambda of: (inside[of[0]], order[of[1]])) for name in op.reads]
        for value, path in chain.from_iterable(gathered_by):
            holders[value, path] -= 1
            if not holders[value, path] and not timeline.plan.by_name[path].resident:
                ops.append(replace(op, reads=(value,), params=(path,)))
    return timeline.with_ops(ops)

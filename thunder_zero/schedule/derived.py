"""Values derived from parameters alone: what they are made from, and which backward makes again.

In: a timeline, whose :attr:`Timeline.derived` has the derived values. Out: names of values::

    gather  fut <- t_w
    wait    w   <- fut        derived
    compute wt  <- w          derived, if repeatable
    compute c   <-            not derived: a constant, which derived values may be made from
    compute wc  <- wt, c      derived
    compute y   <- x, wc      not derived: it depends on data too
    compute c   <- t_v        derived, if it casts a replicated parameter

Saving a derived value for backward is as good as saving the parameter itself, and it may be a view of the gathered
buffer. So a pass that frees parameters or gathers them again starts from the derived values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from thunder_zero.schedule.timeline import Kind, Timeline


def gathered_from(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """The derived values, each with the gathered parameters (values) that it is made from, and may be a view of."""
    found: dict[str, tuple[str, ...]] = {}
    for name, at in timeline.derived.items():
        op = timeline.ops[at]
        of_reads = chain.from_iterable(found.get(read, ()) for read in op.reads)
        found[name] = (name,) if op.kind is Kind.WAIT else tuple(dict.fromkeys(of_reads))
    return found


def regathered(timeline: Timeline) -> dict[str, int]:
    """The derived values of forward that backward must not read, each with the position of its writer.

    They depend on a parameter that is gathered again, or on the cast copy of a replicated one. Includes the handles of
    the gathers.
    """
    found: dict[str, int] = {}
    for at, op in enumerate(timeline.ops[: timeline.backward_start]):
        if op.kind is Kind.GATHER:
            writes = op.writes if any(not param.kept_unsharded for param in timeline.params_of(op)) else ()
        elif timeline.ends(op, Kind.GATHER):
            params = timeline.params_of(op)
            writes = tuple(name for name, param in zip(op.writes, params, strict=True) if not param.kept_unsharded)
        else:
            writes = () if found.keys().isdisjoint(op.reads) and timeline.cast.isdisjoint(op.reads) else op.writes
        found.update((name, at) for name in writes if name in timeline.derived or op.kind is Kind.GATHER)
    return found


def needed_in_backward(timeline: Timeline, writer: Mapping[str, int]) -> set[str]:
    """Of these values of forward, given with their writers: those that backward reads, and those they come from."""
    needed: set[str] = set()
    reads = [read for op in timeline.ops[:-1] if op.backward for read in op.reads]
    while reads:
        name = reads.pop()
        if name in writer and name not in needed:
            needed.add(name)
            reads += timeline.ops[writer[name]].reads
    return needed

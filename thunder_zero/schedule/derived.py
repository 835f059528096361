"""Finds values derived from parameters alone, their sources, and their uses in backward.

In: a timeline, with its :attr:`Timeline.derived`. Out: names of values::

    gather  fut <- t_w
    wait    w   <- fut        derived
    compute wt  <- w          derived, if repeatable
    compute c   <-            not derived: a constant, which derived values may read
    compute wc  <- wt, c      derived
    compute y   <- x, wc      not derived: it depends on data too
    compute c   <- t_v        derived, if it casts a replicated parameter

A derived value that is saved for backward takes as much memory as its parameter, or is a view of the gathered buffer.
So a pass that frees parameters, or gathers them again, must also handle derived values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from thunder_zero.schedule.ops import Gather, Return, Wait, ends
from thunder_zero.schedule.timeline import Timeline


def gathered_from(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """Return a mapping from derived values to the gathered parameters that they are computed from, or view."""
    sources: dict[str, tuple[str, ...]] = {}
    for name, index in timeline.derived.items():
        op = timeline.ops[index]
        sources_of_reads = chain.from_iterable(sources.get(read, ()) for read in op.reads)
        sources[name] = (name,) if isinstance(op, Wait) else tuple(dict.fromkeys(sources_of_reads))
    return sources


def regathered(timeline: Timeline) -> dict[str, int]:
    """Return the derived values of forward that backward must not read, mapped to the index of their writer. Each value
    depends on a parameter that is gathered again, or on the cast copy of a replicated parameter. Handles of gathers are
    included."""
    writers: dict[str, int] = {}
    for index, op in enumerate(timeline.ops[: timeline.backward_start]):
        if isinstance(op, Gather):
            writes = op.writes if any(not param.kept_unsharded for param in timeline.params_of(op)) else ()
        elif ends(op, Gather):
            params = timeline.params_of(op)
            writes = tuple(name for name, param in zip(op.writes, params, strict=True) if not param.kept_unsharded)
        else:
            writes = () if writers.keys().isdisjoint(op.reads) and timeline.cast.isdisjoint(op.reads) else op.writes
        writers.update((name, index) for name in writes if name in timeline.derived or isinstance(op, Gather))
    return writers


def needed_in_backward(timeline: Timeline, writer: Mapping[str, int]) -> set[str]:
    """Return the keys of ``writer`` that backward needs, directly or through other keys of ``writer``."""
    needed: set[str] = set()
    ops = (op for op in timeline.ops if op.backward and not isinstance(op, Return))
    reads = [read for op in ops for read in op.reads]
    while reads:
        name = reads.pop()
        if name in writer and name not in needed:
            needed.add(name)
            reads += timeline.ops[writer[name]].reads
    return needed

"""Frees each gathered parameter right after its last use.

::

    wait    w   <- fut                      wait    w   <- fut
    compute wt  <- w                        compute wt  <- w
    compute y   <- x, wt             -->    compute y   <- x, wt
    compute z   <- y                        free    w
                                            compute z   <- y

The last use of a parameter is the last read of the parameter or of a value that may be a view of it. A parameter that
is gathered again for backward (``regather.py``) has a last use in each phase. A parameter that is kept unsharded
usually has its last use in backward. Resident and replicated parameters are never freed, nor are values that the return
reads.

A FREE is only a mark: ``traces/lift.py`` emits no line for a FREE. Later ``traces/split.py`` writes a ``del``
line after each value's last use. ``lift_phases`` reads these ``del`` lines as FREEs again, and ``verify.check``
requires a FREE right after the last use of each gathered parameter.
"""

from __future__ import annotations

from collections import defaultdict

from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.timeline import Kind, Op, Timeline


def free(timeline: Timeline) -> Timeline:
    """Insert a FREE after the last use of each gathered parameter."""
    last_read = last_reads(timeline, gathered_from(timeline))
    end = len(timeline.ops) - 1
    after: defaultdict[int, list[Op]] = defaultdict(list)
    for _, name, param in timeline.gathered:
        index = last_read[name]
        if index != end and not param.resident:
            after[index].append(Op(Kind.FREE, (name,), params=(param.path,), backward=timeline.ops[index].backward))
    return timeline.with_ops(new for index, op in enumerate(timeline.ops) for new in (op, *after.get(index, ())))

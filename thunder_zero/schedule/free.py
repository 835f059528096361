"""Frees each gathered parameter right after its last use.

::

    wait    w   <- fut                      wait    w   <- fut
    compute wt  <- w                        compute wt  <- w
    compute y   <- x, wt             -->    compute y   <- x, wt
    compute z   <- y                        free    w
                                            compute z   <- y

The last use of a parameter is the last read of it or of a value derived from it, which may be a view of it.
If it is regathered for backward (``regather.py``), each phase has a last use; if it is kept unsharded, backward mostly
has it. Resident and replicated parameters are never freed, nor are values that the return reads.

This pass only says where: ``traces/lift.py`` emits no FREE. In the order that it emits, ``traces/split.py`` (or
Thunder's ``del_last_used``) writes a ``del`` line after each value's last use; ``lift_phases`` reads the ``del`` lines
of the traces that run as FREEs again, and ``verify.check`` requires one right after the last use of each gathered
parameter.
"""

from __future__ import annotations

from collections import defaultdict

from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads
from thunder_zero.schedule.timeline import Kind, Op, Timeline


def free(timeline: Timeline) -> Timeline:
    """Inserts a FREE after the last use of each gathered parameter."""
    last = last_reads(timeline, gathered_from(timeline))
    end = len(timeline.ops) - 1
    after: defaultdict[int, list[Op]] = defaultdict(list)
    for _, name, param in timeline.gathered:
        at = last[name]
        if at != end and not param.resident:
            after[at].append(Op(Kind.FREE, (name,), params=(param.path,), backward=timeline.ops[at].backward))
    return timeline.with_ops(new for at, op in enumerate(timeline.ops) for new in (op, *after.get(at, ())))

"""Frees each value, and so each gathered parameter, right after its last use.

::

    wait    w   <- fut                      wait    w   <- fut
    compute wt  <- w                        compute wt  <- w
    compute y   <- x, wt             -->    compute y   <- x, wt
    compute z   <- y                        free    w
                                            compute z   <- y

The last use of a parameter is the last read of the parameter or of a value that may be a view of it. A parameter that
is gathered again for backward (``regather.py``) has a last use in each phase. A parameter that is kept unsharded
usually has its last use in backward. Resident and replicated parameters are never freed, nor are values that a return
reads. All other values are dropped after their last use, too: a FREE is a ``del`` line. A wait drops its handle.
The caller holds forward's inputs until backward.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from thunder_zero.schedule.derived import gathered_from
from thunder_zero.schedule.lifetimes import last_reads, last_uses
from thunder_zero.schedule.ops import Free, Op, Return
from thunder_zero.schedule.timeline import Timeline


def free(timeline: Timeline) -> Timeline:
    """Let forward save what backward reads, and insert a FREE after the last use of values.

    If forward has its FREEs, and saves more than backward reads, backward begins by dropping the rest.
    """
    timeline = _saving(timeline)
    ops, start = timeline.ops, timeline.backward_start
    done = {name for op in ops if isinstance(op, Free) for name in op.reads}
    freed: defaultdict[int, list[str]] = defaultdict(list)
    for name, index in last_uses(ops, lambda name: (name,)).items():
        op = ops[index]
        stays = name not in op.saves if isinstance(op, Return) else _is_held(name, index, timeline)
        if not stays and name not in done and name not in timeline.launches:
            freed[index].append(name)
    made_from = gathered_from(timeline)
    last_read = last_reads(timeline, made_from)
    returned = {
        name for op in ops if isinstance(op, Return) for read in op.returned for name in made_from.get(read, ())
    }
    path_of = {name: param.path for _, name, param in timeline.gathered if not param.resident and name not in returned}

    def with_free(index: int, op: Op) -> tuple[Op, ...]:
        if index not in freed:
            return (op,)
        sources = dict.fromkeys(name for value in freed[index] for name in made_from.get(value, ()))
        paths = (path_of[name] for name in sources if name in path_of and last_read[name] == index)
        return op, Free(tuple(freed[index]), tuple(paths), index + 1 >= start)

    return timeline.with_ops(new for index, op in enumerate(ops) for new in with_free(index, op))


def _is_held(name: str, index: int, timeline: Timeline) -> bool:
    """Return whether the caller holds a value, since it is an input of forward, and backward follows."""
    return name in timeline.inputs and index < timeline.backward_start < len(timeline.ops)


def _saving(timeline: Timeline) -> Timeline:
    """Return the timeline with the values that forward saves for backward in forward's return."""
    start = timeline.backward_start
    backward = timeline.ops[start:]
    own = {name for op in backward for name in op.writes} | timeline.tangents
    end = timeline.ops[start - 1]
    if not backward or not isinstance(end, Return) or end.saves:
        return timeline
    saves = dict.fromkeys(name for op in backward for name in op.reads if name not in own)
    return timeline.with_ops([*timeline.ops[: start - 1], replace(end, saves=tuple(saves)), *backward])

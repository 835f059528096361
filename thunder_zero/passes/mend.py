"""What fusion undid.

A fuser may recompute in backward from what a region of forward reads, and that may be a gathered
parameter. Backward then reads the copy that it has anyway, waited for earlier if need be, or one
that is gathered for it::

    wait    w  <- fut                      wait    w  <- fut
    ... backward ...                       ... backward ...
    compute gx <- gy, w             -->    wait    w_again <- fut_again
    wait    w_again <- fut_again           compute gx <- gy, w_again
    compute gz <- gx, w_again              compute gz <- gx, w_again
"""

from __future__ import annotations

from dataclasses import replace

from thunder_zero.cone import cone, not_kept
from thunder_zero.passes.keep import keep
from thunder_zero.timeline import Kind, Op, Timeline


def mend(timeline: Timeline) -> Timeline:
    """Lets backward read its own gathers; the same timeline where it does already."""
    forward = {name for name, at in not_kept(timeline, cone(timeline)).items() if not timeline.ops[at].backward}
    stray = {read for op in timeline.ops[:-1] if op.backward for read in op.reads if read in forward}
    return keep(_read_copies(timeline, stray)) if stray else timeline


def _read_copies(timeline: Timeline, stray: set[str]) -> Timeline:
    """Replace gathered values of forward by backward's gathers of the same parameters, where there are any."""
    path_of = {
        name: path
        for op in timeline.ops
        if timeline.ends(op, Kind.GATHER) and not op.backward
        for name, path in zip(op.writes, op.params, strict=True)
    }
    waits = {path: op for op in timeline.ops if timeline.ends(op, Kind.GATHER) and op.backward for path in op.params}
    copies = {name: path for name in stray if (path := path_of.get(name)) in waits}
    ops: list[Op] = []
    done: set[Op] = set()
    for op in timeline.ops:
        if op in done:
            continue
        for path in (copies[read] for read in op.reads if op.backward and read in copies):
            for needed in (timeline.launches[waits[path].reads[0]], waits[path]):
                if needed not in done:
                    ops.append(needed)
                    done.add(needed)
        if op.kind in (Kind.GATHER, Kind.WAIT):
            done.add(op)
        names = {read: waits[copies[read]].writes[waits[copies[read]].params.index(copies[read])]
                 for read in op.reads if op.backward and read in copies}
        ops.append(replace(op, reads=tuple(names.get(read, read) for read in op.reads)) if names else op)
    return timeline.with_ops(ops)

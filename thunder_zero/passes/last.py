"""What forward keeps although the stage would free it.

Backward begins with the units that forward ends with. While it has nothing else gathered, keeping
them costs no memory that the peak does not take anyway, and saves a gather each::

    forward   a  b  c  d            peak: three units (one computes, two are under way)
    backward           d  c  b  a   c and d may stay gathered from forward
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from thunder_zero.cone import cone, not_kept
from thunder_zero.passes.bucket import bucket
from thunder_zero.passes.free import free
from thunder_zero.passes.keep import keep
from thunder_zero.passes.launch import launch
from thunder_zero.passes.wait import wait
from thunder_zero.timeline import Kind, Timeline, gathered_bytes


def keep_last(timeline: Timeline) -> Timeline:
    """Keeps the last units of forward, as many as do not raise the peak of gathered bytes (``policy.keep_last``)."""
    if not timeline.plan.policy.keep_last:
        return timeline
    bound = _peak(timeline)
    kept: frozenset[str] = frozenset()
    best = timeline
    for paths in _runs_from_the_last(timeline):
        kept |= paths
        params = tuple(replace(param, kept=param.kept or param.path in kept) for param in timeline.plan.params)
        trial = replace(timeline, plan=replace(timeline.plan, params=params))
        if _peak(trial) > bound:
            break
        best = trial
    return best


def _peak(timeline: Timeline) -> int:
    """The most gathered bytes that are alive at once, were it scheduled as it is."""
    return max(gathered_bytes(free(wait(launch(bucket(keep(timeline)))))), default=0)


def _runs_from_the_last(timeline: Timeline) -> list[frozenset[str]]:
    """The parameters that backward would gather again, those that forward gathers last first, a unit at a time.

    The root unit comes in several runs: its embedding at the end, its head at the start.
    """
    chain = {name: at for name, at in not_kept(timeline, cone(timeline)).items() if not timeline.ops[at].backward}
    needed: set[str] = set()
    reads = [read for op in timeline.ops[:-1] if op.backward for read in op.reads]
    while reads:
        name = reads.pop()
        if name in chain and name not in needed:
            needed.add(name)
            reads += timeline.ops[chain[name]].reads
    gathers = [op for op in reversed(timeline.ops) if op.kind is Kind.GATHER and not op.backward]
    wanted = [param for op in gathers if op.writes[0] in needed for param in timeline.params_of(op)]
    return [frozenset(param.path for param in run) for _, run in groupby(wanted, key=lambda param: param.unit)]

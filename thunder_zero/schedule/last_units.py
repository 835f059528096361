"""Chooses the last units of forward that are kept unsharded for backward.

Backward begins with the units that forward ends with. A unit that stays gathered between the phases saves a gather.
This needs no more bytes than the peak of the other gathers::

    forward   a  b  c  d            peak: three units (one computes, two are in flight)
    backward           d  c  b  a   c and d may stay gathered from forward
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from thunder_zero.plan.params import Plan
from thunder_zero.schedule.derived import needed_in_backward, regathered
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Gather
from thunder_zero.schedule.timeline import Timeline


def choose_last_units(timeline: Timeline, schedule: Callable[[Timeline], Timeline]) -> Timeline:
    """Keep as many of forward's last units unsharded as fit into the peak of gathered bytes. ``schedule`` inserts and
    moves gathers, and inserts FREEs."""
    if timeline.plan.policy.reshard_after_forward or not (runs := _runs_from_last(timeline)):
        return timeline

    def peak(plan: Plan) -> int:
        return max(gathered_bytes(schedule(replace(timeline, plan=plan))))

    def keeping(count: int) -> Plan:
        return timeline.plan.keeping(frozenset().union(*runs[:count]))

    bound = peak(timeline.plan)
    return replace(timeline, plan=keeping(largest(lambda count: peak(keeping(count)) <= bound, len(runs))))


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to ``limit`` that fits. All numbers below a number that fits must fit; 0 must fit.

    Each try may be expensive, so only a few numbers are tried: first powers of two, then by bisection.

    >>> largest(lambda number: number * number <= 30, limit=100)
    5
    """
    step = 1
    while step <= limit and fits(step):
        step *= 2
    untried = range(step // 2 + 1, min(step, limit + 1))
    return step // 2 + bisect_left(untried, True, key=lambda number: not fits(number))


def _runs_from_last(timeline: Timeline) -> list[frozenset[str]]:
    """Return a set of paths for each unit: the parameters that backward would gather again. Forward's last unit comes
    first. Parameters that backward does not read (biases) are included, since a fuser may make backward read them. The
    root unit may occur several times."""
    needed = needed_in_backward(timeline, regathered(timeline))
    gathers = [op for op in reversed(timeline.ops) if isinstance(op, Gather) and not op.backward]
    runs = [list(run) for _, run in groupby(gathers, key=lambda op: timeline.params_of(op)[0].unit)]
    return [
        frozenset(path for op in run for path in op.params) for run in runs if any(op.handle in needed for op in run)
    ]

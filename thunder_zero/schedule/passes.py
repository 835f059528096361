"""Runs the passes, pure functions from timeline to timeline, with a proof after each."""

from __future__ import annotations

from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.free import free
from thunder_zero.schedule.last_units import gather_last_units_once
from thunder_zero.schedule.prefetch import prefetch
from thunder_zero.schedule.recompute import recompute
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.sink_waits import sink_waits
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.verify import check_pass, check_schedule
from thunder_zero.schedule.verify_recompute import check_recompute

PASSES = (
    gather_last_units_once,  # choose the last units that are gathered once, without raising the peak
    regather,  # gather again what forward frees: for backward, and for each unit if the policy says so
    bucket,  # merge gathers, and reductions, of one unit and dtype
    prefetch,  # start gathers ahead of their use, within the bytes in flight
    sink_waits,  # end reductions late, within the bytes in flight
    recompute,  # compute again in backward what is cheap, rather than save it; no collective moves any more
    free,  # free each gathered parameter after its last use; last, because now uses do not move any more
)


def run(timeline: Timeline) -> Timeline:
    """The schedule of a lifted timeline: every pass in order, with a check before the first and after each.

    Raises:
        ScheduleError: a pass, or the lifted timeline, broke a rule (:mod:`thunder_zero.schedule.verify`).
    """
    lifted = timeline
    check_pass(lifted, lifted)
    *steps, last = PASSES
    for step in steps:
        before, timeline = timeline, step(timeline)
        check_pass(timeline, lifted)
        if step is recompute:
            check_recompute(timeline, before)
    timeline = last(timeline)
    check_schedule(timeline, lifted)
    return timeline

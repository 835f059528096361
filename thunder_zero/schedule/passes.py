"""Runs the passes, pure functions from timeline to timeline, with a proof after each.

In: a lifted timeline. Out: its schedule. :func:`run` proves each result, :func:`apply_passes` does not. To add a pass,
see "How to add a pass" in CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from thunder_zero.schedule.bucket import bucket
from thunder_zero.schedule.free import free
from thunder_zero.schedule.last_units import choose_last_units
from thunder_zero.schedule.ops import Defer, Op, Reduce, ends
from thunder_zero.schedule.prefetch import prefetch
from thunder_zero.schedule.recompute import recompute
from thunder_zero.schedule.regather import regather
from thunder_zero.schedule.sink_waits import sink_waits
from thunder_zero.schedule.timeline import ScheduleError, Timeline
from thunder_zero.schedule.verify import check_pass, check_schedule
from thunder_zero.schedule.verify_in_flight import check_making
from thunder_zero.schedule.verify_recompute import check_recompute

Pass = Callable[[Timeline], Timeline]


def apply_passes(timeline: Timeline, passes: Sequence[Pass]) -> Timeline:
    """Return the timeline after some passes, without a proof."""
    for step in passes:
        timeline = step(timeline)
    return timeline


def keep_last_units(timeline: Timeline) -> Timeline:
    """Keep as many last units of forward unsharded as possible without raising the peak of gathered bytes."""
    return choose_last_units(timeline, lambda candidate: apply_passes(candidate, (*GATHERING, free)))


GATHERING = (
    regather,  # gather freed parameters again: for backward, and for each unit with ``gather_per_unit``
    bucket,  # merge gathers of one unit and dtype, and reductions
    prefetch,  # start gathers ahead of their use, within the bytes in flight
)
PASSES = (
    keep_last_units,  # choose the last units that are kept unsharded, without raising the peak
    *GATHERING,  # from here on no gather moves
    sink_waits,  # end reductions late, within the bytes in flight
    recompute,  # recompute cheap values in backward instead of saving them; from here on no collective moves
)


def defer(timeline: Timeline) -> Timeline:
    """Keep each gradient for a later backward (``no_sync``): a DEFER in place of its reductions."""
    mean_of = dict(timeline.gradients)
    ops: list[Op] = []
    for op in timeline.ops:
        if isinstance(op, Reduce) and not timeline.is_second_reduction(op):
            ops += [Defer((grad,), (mean_of[path],), (path,)) for grad, path in zip(op.reads, op.params, strict=True)]
        elif not isinstance(op, Reduce) and not ends(op, Reduce):
            ops.append(op)
    return timeline.with_ops(ops)


def run(timeline: Timeline) -> Timeline:
    """Run every pass, in order, on a lifted timeline. Prove the timeline before the first pass and after each pass.
    Errors name the user's pass.

    The user's passes (``Policy.passes``) run last. ``free`` comes after fusion, which moves last uses.
    """
    lifted = timeline
    check_pass(lifted, lifted)
    for step in PASSES:
        before, timeline = timeline, step(timeline)
        check_pass(timeline, lifted)
        if step is recompute:
            check_recompute(timeline, before)
    for custom in lifted.plan.policy.passes:
        timeline = _run_custom(custom, timeline, lifted)
    check_schedule(timeline, lifted)
    return timeline


def _run_custom(custom: Pass, timeline: Timeline, lifted: Timeline) -> Timeline:
    """Return the timeline after a user's pass, proved like the timeline after a built-in pass."""
    name = getattr(custom, "__name__", type(custom).__name__)
    try:
        result = custom(timeline)
    except Exception as error:
        raise ScheduleError(f"the pass {name} of Policy.passes raised {type(error).__name__}: {error}") from error
    if not isinstance(result, Timeline):
        raise TypeError(f"the pass {name} returned {type(result).__name__}; return a thunder_zero.schedule.Timeline")
    try:
        check_pass(result, lifted)
        check_making(result)
    except ScheduleError as error:
        raise ScheduleError(f"after the pass {name} of Policy.passes: {error}") from None
    return result

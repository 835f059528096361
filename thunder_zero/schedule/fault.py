"""The error of a timeline that breaks a rule."""

from __future__ import annotations

from thunder_zero.schedule.timeline import Timeline

MOST_NAMES = 8  # of an operation, in an error


class ScheduleError(Exception):
    """A timeline breaks a rule. The message names the operation, its parameters and the rule, in one sentence."""


def fault(timeline: Timeline, at: int, rule: str) -> ScheduleError:
    """The error for an operation that breaks a rule; ``rule`` goes on after its name."""
    op = timeline.ops[at]
    names = op.params or op.writes or op.reads
    what = ", ".join(names if len(names) <= MOST_NAMES else (*names[:MOST_NAMES], "..."))
    return ScheduleError(f"op {at} ({op.kind} {what}) {rule}")

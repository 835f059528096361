"""Says why a gather, a free and a wait are where they are, and how long a parameter lives."""

from __future__ import annotations

from math import prod

from thunder_zero import layout
from thunder_zero.amounts import size
from thunder_zero.plan import Param, Plan
from thunder_zero.policy import STAGES
from thunder_zero.schedule.prefetch import Bound
from thunder_zero.schedule.timeline import Kind, Timeline
from thunder_zero.tools.report.line_meanings import label


def lifetime(param: Param, timeline: Timeline, gathers: int) -> str:
    """What the stage means for a parameter that a step gathers so many times."""
    plan = timeline.plan
    stage = STAGES[plan.policy.stage]
    if not param.sharded:
        return f"every rank has all of it: {_why_replicated(param, plan)}"
    if param.resident:
        return f"{stage.name} shards it for the optimizer; all of it stays in memory, so that nothing is freed"
    if gathers == 0:
        return f"{stage.name} gathers it where it is used"
    if stage.gathered_once:
        return f"{stage.name} gathers it once, in forward, and frees it after its last use"
    if not param.gathered_once and gathers == 1:
        return f"{stage.name} frees it after its last use in forward; {_no_backward(timeline)}"
    if not param.gathered_once:
        return f"{stage.name} frees it after its last use in each half, and gathers it again for backward"
    return f"{stage.name} gathers it once for forward and backward: {_why_once(param, plan)}"


def _no_backward(timeline: Timeline) -> str:
    return "backward does not read it" if timeline.ops[-1].backward else "there is no backward"


def _why_replicated(param: Param, plan: Plan) -> str:
    policy = plan.policy
    if not STAGES[policy.stage].sharded:
        return "DDP shards nothing"
    if not layout.is_sharded(param.shape):
        return "it has no rows to cut"
    nbytes = prod(param.shape) * param.dtype.itemsize
    if nbytes < policy.replicate_below_bytes:
        return f"its {size(nbytes)} are below Policy.replicate_below_bytes={policy.replicate_below_bytes:,}"
    return "Policy.replicated names it"


def _why_once(param: Param, plan: Plan) -> str:
    if param.unit in plan.policy.keep_units:
        return "Policy.keep_units names its unit"
    return "it is among the last that forward gathers, and staying does not raise the peak of gathered bytes"


def why_launch(timeline: Timeline, at: int, after: int, bound: Bound) -> str:
    """Why a gather starts at position ``at``, given what :func:`thunder_zero.schedule.prefetch.bounds` says."""
    half = "backward" if timeline.ops[at].backward else "forward"
    if bound is Bound.PHASE:
        return f"it starts with {half}, so that it ends as soon as it can"
    if bound is Bound.USE:
        field = "prefetch" if timeline.plan.sizes.ahead_bytes else "in_flight_bytes"
        return f"it starts right before its use: Policy.{field}=0"
    place = _place(timeline, after)
    if bound is Bound.PREFETCH:
        prefetch = timeline.plan.sizes.prefetch
        count = "one unit" if prefetch == 1 else f"{prefetch} units"
        return f"it starts {place}, {count} ahead (Policy.prefetch)"
    if bound is Bound.TIMES:
        return f"it starts {place}: by the measured times (Policy.times) it still ends before its use"
    if bound is Bound.FIRST:
        return f"it starts {place}: the first gather of {half} has the wire to itself"
    if bound is Bound.IN_FLIGHT:
        limit = size(timeline.plan.sizes.in_flight_bytes)
        return f"it starts {place}: earlier, more than {limit} would be in flight (Policy.in_flight_bytes)"
    return "it starts after the gather before it, whose use comes first, or after the line that writes its shard"


def _place(timeline: Timeline, after: int) -> str:
    """``right after the wait for blocks.1: 6 parameters``."""
    op = timeline.ops[after]
    if op.kind is Kind.WAIT:
        return f"right after the wait for {label(op.params, timeline.plan, gradients=False)}"
    return "right before backward first reads a bucket that forward gathered"


def why_free(timeline: Timeline, wait: int, free: int | None, last_read: int | None) -> str:
    """Why the parameter that a wait brings is freed at position ``free``, or is not."""
    op = timeline.ops[wait]
    if free is None:
        return "it stays in memory"
    if last_read is None:
        return "nothing reads it: it is gathered with its bucket"
    if timeline.ops[free].backward and not op.backward:
        return "after its last use in backward, which reads what forward gathered"
    again = any(
        other.kind is Kind.GATHER and set(other.params) & set(timeline.ops[free].params)
        for other in timeline.ops[free:]
    )
    if again:
        return "after its last use in this half; it is gathered again"
    return "after its last use" if op.backward else f"after its last use; {_no_backward(timeline)}"


def why_wait(timeline: Timeline, at: int) -> str:
    """Why a reduction is waited for at position ``at``."""
    op, rest = timeline.ops[at], timeline.ops[at + 1 :]
    if all(other.kind is not Kind.COMPUTE for other in rest[:-1]):
        return "at the end of backward, behind all of its compute"
    if any(set(other.reads) & set(op.writes) for other in rest[:-1] if other.kind is Kind.COMPUTE):
        return "right before the line that reads the reduced gradient"
    limit = size(timeline.plan.sizes.in_flight_bytes)
    if next(other for other in rest if other.kind is not Kind.WAIT).kind is Kind.GATHER:
        what = "gathers start ahead: with them"
    else:
        what = "the next gradient is made: with it"
    return f"before {what}, more than {limit} would be in flight (Policy.in_flight_bytes)"

"""Says why a line of a step stands where it stands, from the passes of the schedule.

::

    fut0 = zero_all_gather(t_w, 'h.1.w')
        it starts right after the wait for h.0.w, one unit ahead (Policy.prefetch)
"""

from __future__ import annotations

from itertools import islice
from math import prod

from thunder_zero.plan.amounts import size
from thunder_zero.plan.geometry import cut_rows
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.ops import Compute, Free, Gather, Op, Wait
from thunder_zero.schedule.prefetch import Bound
from thunder_zero.tools.table.rows import Row, label
from thunder_zero.tools.table.table import Table

OF_SLICES = {
    "all_reduce": "each rank has a part of a sum, and the lines behind it need all of it",
    "gather": "the lines behind it need the parts of all ranks",
    "scatter": "each rank has a part of a sum, and the lines behind it need some of its rows",
    "all_to_all": "the lines behind it need other parts than those that this rank has",
}


def why_launch(table: Table, op: Op) -> str:
    """Return the reason for the position of a launch."""
    if isinstance(op, Compute):
        return OF_SLICES[str(op.work)]
    if isinstance(op, Gather):
        return _why_gather(table, op)
    wait = [row for row in table.by_param[op.params[0]] if row.kind == "wait" and row.gradients][-1]
    return f"it starts as soon as its gradients are made; its wait: {why_wait(table, wait)}"


def _why_gather(table: Table, op: Gather) -> str:
    after, bound = table.bounds[op.writes[0]]
    timeline = table.traces.timeline
    sizes, phase = timeline.plan.sizes, "backward" if op.backward else "forward"
    if bound is Bound.PHASE:
        return f"it starts with {phase}, so that it ends as soon as it can"
    if bound is Bound.USE:
        return f"it starts right before its use: Policy.{'prefetch' if sizes.ahead_bytes else 'in_flight_bytes'}=0"
    if bound is Bound.EARLIER:
        return "it starts after the gather before it, whose use comes first, or after the line that writes its shard"
    before, count = timeline.ops[after], "one unit" if sizes.prefetch == 1 else f"{sizes.prefetch} units"
    place = "right before backward first reads a bucket that forward gathered"
    if isinstance(before, Wait):
        place = f"right after the wait for {label(before.params, timeline.plan, gradients=False)}"
    return {
        Bound.PREFETCH: f"it starts {place}, {count} ahead (Policy.prefetch)",
        Bound.TIMES: f"it starts {place}: by the measured times (Policy.times) it still ends before its use",
        Bound.FIRST: f"it starts {place}: the first gather of {phase} has the wire to itself",
        Bound.IN_FLIGHT: f"it starts {place}: earlier, more than {size(sizes.in_flight_bytes)} would be in flight "
        "(Policy.in_flight_bytes)",
    }[bound]


def why_free(table: Table, wait: Row, free: Row | None, *, is_read: bool) -> str:
    """Return why a parameter is freed in a line, or why it stays gathered if ``free`` is None."""
    if free is None:
        return "it stays in memory"
    if not is_read:
        return "nothing reads it: it is gathered with its bucket"
    if free.phase != wait.phase:
        return "after its last use in backward, which reads what forward gathered"
    later = (row for path in free.params for row in table.by_param[path] if (row.op or 0) > (free.op or 0))
    if any(row.kind == "gather" for row in later):
        return "after its last use in this phase; it is gathered again"
    return "after its last use" if free.phase == "backward" else f"after its last use; {no_backward(table)}"


def why_wait(table: Table, wait: Row) -> str:
    """Return the reason for the position of a wait for a reduction."""
    ops, index, reads = table.traces.timeline.ops, wait.op or 0, table.last_reads
    if index > max(reads.values(), default=-1):
        return "at the end of backward, behind all of its compute"
    if any(reads.get(gradient, -1) > index for gradient in ops[index].writes):
        return "right before the line that reads the reduced gradient"
    limit = size(table.traces.plan.sizes.in_flight_bytes)
    following = next(op for op in islice(ops, index + 1, None) if not isinstance(op, Wait | Free))
    event = "gathers start ahead: with them" if isinstance(following, Gather) else "the next gradient is made: with it"
    return f"before {event}, more than {limit} would be in flight (Policy.in_flight_bytes)"


def no_backward(table: Table) -> str:
    """Return why nothing in backward reads a parameter."""
    return "backward does not read it" if table.traces.timeline.ops[-1].backward else "there is no backward"


def why_no_gradient(table: Table, param: Param) -> str:
    """Return the reason why a parameter has no gradient."""
    if not param.requires_grad:
        return "it is frozen (requires_grad=False)"
    return "there is no backward" if table.traces.backward is None else "backward does not reach it"


def lifetime(table: Table, param: Param, gathers: int) -> str:
    """Describe when the stage gathers and frees a parameter. ``gathers`` counts the gathers in a step."""
    stage = STAGES[table.traces.plan.policy.stage]
    if not param.sharded:
        return f"every rank has all of it: {_why_replicated(param, table.traces.plan)}"
    if param.resident:
        return f"{stage.name} shards it for the optimizer; all of it stays in memory, so that nothing is freed"
    if gathers == 0:
        return f"{stage.name} gathers it where it is used"
    if stage.kept_unsharded:
        return f"{stage.name} gathers it once, in forward, and frees it after its last use"
    if not param.kept_unsharded and gathers == 1:
        return f"{stage.name} frees it after its last use in forward; {no_backward(table)}"
    if not param.kept_unsharded:
        return f"{stage.name} frees it after its last use in each phase, and gathers it again for backward"
    is_named = param.unit in table.traces.plan.policy.keep_unsharded
    last = "it is among the last that forward gathers, and staying does not raise the peak of gathered bytes"
    why = "Policy.keep_unsharded names its unit" if is_named else last
    return f"{stage.name} gathers it once for forward and backward: {why}"


def _why_replicated(param: Param, plan: Plan) -> str:
    policy, nbytes = plan.policy, prod(param.shape) * param.dtype.itemsize
    if not STAGES[policy.stage].sharded:
        return "DDP shards nothing"
    if not cut_rows(param.shape, plan.mesh).is_cut:
        return "it has no rows to cut"
    if nbytes < policy.replicate_below_bytes:
        return f"its {size(nbytes)} are below Policy.replicate_below_bytes={policy.replicate_below_bytes:,}"
    return "Policy.replicated names it"

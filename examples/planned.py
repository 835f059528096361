"""What a rank holds and sends, by its plan and its timeline, without a step: bytes at rest, at the peak, sent."""

from __future__ import annotations

from math import prod

import thunder_zero as tz  # before thunder
from thunder_zero.plan.traffic import gather_traffic, reduce_traffic
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.timeline import Timeline


def at_rest(plan: tz.schedule.Plan, values: int) -> dict[str, int]:
    """Return the bytes that a rank holds between two steps.

    The optimizer keeps ``values`` of each element, in the shard's dtype, but none of the padding. ZeRO-1 keeps all rows
    in the dtype of compute; its own rows are a view of them, if the dtypes agree.
    """
    stored = {param: param.dtype.itemsize * prod(plan.shard_shape(param)) for param in plan.params}
    own = sum(nbytes for param, nbytes in stored.items() if param.is_cast or not param.resident)
    full = sum(param.full_bytes for param in plan.params if param.resident)
    stepped = sum(param.dtype.itemsize * plan.geometry(param).numel for param in plan.params)
    return {"parameters": own + full, "gradients": sum(stored.values()), "optimizer": values * stepped}


def foreseen_at_peak(timeline: Timeline) -> int:
    """Return the most bytes of gathered parameters and gradients that are alive together in a step.

    A full gradient lives from the line that computes it to the end of its reduction, and its mean from the reduction's
    start. One rank alone gathers nothing, and its gradients are the means. Activations and messages are not foreseen.
    """
    reduced = {value for op in timeline.ops if isinstance(op, tz.schedule.Reduce) for value in op.reads}
    most = gradients = 0
    for op, parameters in zip(timeline.ops, gathered_bytes(timeline), strict=True):
        gradients += sum(timeline.values[value].nbytes for value in op.writes if value in reduced)
        if timeline.plan.mesh.shard.size == 1:
            parameters = 0
        elif isinstance(op, tz.schedule.Reduce):
            gradients += timeline.values[op.writes[0]].nbytes
        elif tz.schedule.ends(op, tz.schedule.Reduce):
            gradients -= timeline.traffic(op).full
        most = max(most, parameters + gradients)
    return most


def sent_in_step(plan: tz.schedule.Plan, micro_batches: int) -> tuple[int, int]:
    """Return the bytes of parameters and of gradients that this rank sends in an optimizer step.

    Gradients are deferred to the end of the step. ZeRO-3's parameters are an upper bound: backward gathers again only
    what it reads.
    """
    times = [1 if param.resident else micro_batches * (2 - param.kept_unsharded) for param in plan.params]
    parameters = sum(gather_traffic(plan, param).sent * count for param, count in zip(plan.params, times, strict=True))
    return parameters, sum(reduce_traffic(plan, param).sent for param in plan.params)

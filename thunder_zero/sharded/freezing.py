"""Follows ``requires_grad`` of shards: freezing and unfreezing parameters between steps.

In: a model whose shards were frozen or unfrozen since the last forward. Out: a new plan, with which the next program is
captured. Shards, optimizer states and compiled programs are kept::

    model.encoder.requires_grad_(False)      the next forward: a new plan, placeholders that require no gradient
                                             dynamo guards requires_grad, and looks up or captures another graph
"""

from __future__ import annotations

import torch

from thunder_zero.comm.backends import require_reducible
from thunder_zero.comm.collective_tags import CollectiveTag, doing
from thunder_zero.plan.params import Param
from thunder_zero.sharded.runtime import ModelRuntime
from thunder_zero.sharded.state import State


def follow_requires_grad(state: State, runtime: ModelRuntime) -> bool:
    """Plan anew if ``requires_grad`` of a shard has changed since the last forward. Return whether one has.

    This is a collective only if ``no_sync`` holds gradients of a parameter that was frozen. Ranks that freeze different
    parameters learn of it by the tags of their next launches.
    """
    plan, shards = state.plan, state.shards
    changed = [param for param in plan.params if shards[param.path].requires_grad is not param.requires_grad]
    if not changed:
        return False
    new_plan = plan.training({path for path, shard in shards.items() if shard.requires_grad})
    require_reducible(new_plan, state.transport.averages)
    state.take_plan(new_plan)
    for param in changed:
        with torch.DisableTorchFunctionSubclass():
            state.placeholders[param.path].requires_grad_(not param.requires_grad)
    if state.accumulation.grew and (frozen := [param for param in changed if param.requires_grad]):
        _reduce_now(state, runtime, frozen)
    return True


def _reduce_now(state: State, runtime: ModelRuntime, frozen: list[Param]) -> None:
    """Reduce the gradients that ``no_sync`` has deferred before these parameters were frozen. This is a collective.

    As in eager mode, ``.grad`` keeps them. No later backward would reduce them.
    """
    paths = [param.path for param in frozen]
    activity = f"a forward of {state.name}{state.refrozen}"
    with doing("a forward", state.name):
        state.transport.enter(CollectiveTag(activity, repr(paths)))
        for path in paths:
            state.shards[path].requires_grad_(True)  # autograd adds to .grad, and calls hooks
        try:
            runtime.reduce_sums(paths)
        finally:
            for path in paths:
                state.shards[path].requires_grad_(False)

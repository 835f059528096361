"""Hooks around every optimizer step: refuse one on replaced parameters, note the others.

Before a step: refuse one that would be lost or wrong, of parameters that a transform replaced, of shards whose
gradients are not reduced yet, or that hold averages. After it: raise the versions of the rows, by which autograd
refuses a backward whose forward read them before, and mark other ranks' rows of ZeRO-1's buffers as stale: the step of
a DTensor does neither. If torch fails in it, name ``tz.whole``.
"""

from __future__ import annotations

from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thunder_zero.compat.torch_gaps import on_failed_steps
from thunder_zero.runtime import sharded_model
from thunder_zero.runtime.optimizers import StepsWhole, parameters_of
from thunder_zero.runtime.state import State

MIXED = "mixed torch.Tensor and DTensor"  # in an error of torch

_hooked = False


def watch(state: State, module: nn.Module) -> None:
    """From now on note the steps of a model's shards, and refuse steps of its plain module's parameters.

    Args:
        state: the model's.
        module: the plain module, which still has its own parameters.
    """
    global _hooked
    sharded_model.register(state, module)
    if not _hooked:
        for hook in (_refuse_replaced, _refuse_early):
            register_optimizer_step_pre_hook(hook)
        register_optimizer_step_post_hook(_note_step)
        on_failed_steps(_explain)
        _hooked = True


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in parameters_of(optimizer):
        if (before := sharded_model.replaced(param)) is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds the plain module's parameter {before[1].path!r}, which the "
                f"transform replaced, so its step would be lost; build the optimizer on model.parameters() of the "
                f"model that thunder.jit or thunder_zero.zero returned"
            )


def _refuse_early(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    kind, stepped = type(optimizer).__name__, parameters_of(optimizer)
    for state in sharded_model.states():
        if path := state.open_accumulation(stepped):
            raise RuntimeError(
                f"{kind} cannot step: no_sync still holds unreduced gradients of parameter {path!r}; run forward and "
                f"backward of the last micro-batch outside of no_sync, or drop them with model.zero_grad()"
            )
        if not state.averaged.isdisjoint(map(id, stepped)):
            state.require_own_values(f"step {kind}")


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in parameters_of(optimizer)}
    for state in sharded_model.states():
        paths = [path for path, shard in state.shards.items() if id(shard) in stepped]
        increment_version([state.rows[path] for path in paths])
        state.mark_stale(paths)


def _explain(optimizer: Optimizer, error: BaseException) -> None:
    """Add to an error of torch's DTensors, in a step of our shards, what to do."""
    if isinstance(optimizer, StepsWhole) or getattr(error, "__notes__", None) or not _is_of_dtensors(error):
        return
    owners = [sharded_model.owners_of(group["params"]) for group in optimizer.param_groups]
    if any(map(any, owners)):
        mixed = next((number for number, of in enumerate(owners) if any(of) and not all(of)), None)
        error.add_note(f"thunder_zero: {_plain_part(optimizer) or _way_on(optimizer, str(error), mixed)}")


def _plain_part(optimizer: Optimizer) -> str | None:
    """What to do where a shard's gradient, or a state of its shape, is a plain tensor."""
    for shard in parameters_of(optimizer):
        if not isinstance(shard, DTensor):
            continue
        if shard.grad is not None and not isinstance(shard.grad, DTensor):
            return f"a shard of shape {tuple(shard.shape)} has a plain .grad; make it by torch.zeros_like(param)"
        for name, value in optimizer.state.get(shard, {}).items():
            is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor) and value.is_floating_point()
            if is_plain and value.shape == shard.shape and shard.ndim:
                return (
                    f"the state {name!r} of a shard of shape {tuple(shard.shape)} is a plain tensor, as a plain "
                    f"optimizer's is; load it by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
                    f"full_state_dict=True, or by thunder_zero.load"
                )
    return None


def _way_on(optimizer: Optimizer, error: str, mixed: int | None) -> str:
    """What to do; ``mixed`` is the number of a group with shards and other tensors."""
    kind = type(optimizer).__name__
    if mixed is not None and MIXED in error:
        return (
            f"group {mixed} of {kind} has shards, and plain tensors such as parameters that the policy ignores, which "
            f"torch does not step in one list; put the plain ones into a group of their own"
        )
    for option in ("fused", "foreach"):
        if f"_{option}_" in error and any(group.get(option) for group in optimizer.param_groups):
            return f"torch has no rule for the {option} step of {kind} on shards; leave {option}=True out"
    return (
        f"torch cannot take this step of {kind} on shards; step whole parameters instead, with tz.whole({kind}, "
        f"params, ...) in place of {kind}(params, ...), for the same params and options"
    )


def _is_of_dtensors(error: BaseException) -> bool:
    """Whether torch's DTensors raised it, or an operator that was given them."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return MIXED in str(error) or frames[-1].f_globals.get("__name__", "").startswith("torch.distributed.tensor.")

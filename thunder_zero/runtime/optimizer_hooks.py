"""Hooks around every optimizer step: refuse one on replaced parameters, note the others.

Before a step: refuse one that would be lost or wrong, of parameters that a transform replaced, of shards whose
gradients are not reduced yet, or by an optimizer that may read more than one element of a parameter at a time. After
it: mark the other ranks' rows of ZeRO-1's buffers as stale, since fused optimizers do not raise a tensor's version.
Around it: keep padding zero.
"""

from __future__ import annotations

from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thunder_zero.runtime import padding, registry
from thunder_zero.runtime.optimizers import parameters_of
from thunder_zero.runtime.state import State

# torch's optimizers that treat every element alone, so that a step on rows is a step on these rows of the whole.
# By exact type: a subclass may do anything. SparseAdam is left out: gradients of shards are dense.
ELEMENTWISE: frozenset[type] = frozenset(
    (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
        *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
    )
)

_hooked = False


def watch(state: State, module: nn.Module) -> None:
    """From now on note the steps of a model's shards, and refuse steps of its plain module's parameters.

    Args:
        state: the model's.
        module: the plain module, which still has its own parameters.
    """
    global _hooked
    registry.register(state, module)
    if not _hooked:
        register_optimizer_step_pre_hook(_refuse_replaced)
        register_optimizer_step_pre_hook(_refuse_untrusted)
        register_optimizer_step_pre_hook(_refuse_open)
        register_optimizer_step_pre_hook(_clear_padding_of_gradients)
        register_optimizer_step_post_hook(_note_step)
        _hooked = True


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in parameters_of(optimizer):
        path = registry.replaced_path(param)
        if path is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds the plain module's parameter {path!r}, which the transform "
                f"replaced, so its step would be lost; build the optimizer on model.parameters() of the model that "
                f"thunder.jit or thunder_zero.zero returned"
            )


def _refuse_untrusted(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    kind = type(optimizer)
    if kind in ELEMENTWISE:
        return
    for owner in registry.owners_of(parameters_of(optimizer)):
        if owner is None:
            continue
        (state, param) = owner
        if param.sharded and state.plan.world_size > 1 and not state.plan.policy.trust_optimizer:
            bases = [base.__qualname__ for base in kind.__mro__ if base in ELEMENTWISE]
            why = f" (a subclass of torch.optim.{bases[0]} may do anything)" if bases else ""
            raise RuntimeError(
                f"{kind.__module__}.{kind.__qualname__} is not known to treat every element alone{why}, and each rank "
                f"has only some rows of parameter {param.path!r}; use an elementwise optimizer of torch.optim, such as "
                f"AdamW, or stage=0, or give the transform trust_optimizer=True if this one is elementwise"
            )


def _refuse_open(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state in registry.states():
        if path := state.open_accumulation(parameters_of(optimizer)):
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot step: no_sync still holds unreduced gradients of parameter "
                f"{path!r}; run forward and backward of the last micro-batch outside of no_sync, or drop them with "
                f"model.zero_grad()"
            )


def _clear_padding_of_gradients(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in parameters_of(optimizer)}
    for state in registry.states():
        padding.clear_gradients(state, stepped)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in parameters_of(optimizer)}
    for state in registry.states():
        padding.clear_parameters_and_states(state, stepped, optimizer)
        state.mark_stale(path for path, shard in state.shards.items() if id(shard) in stepped)

"""What optimizers have to tell, and must not do: two hooks that torch offers for all of them.

They say what no trace can see: that an optimizer has stepped (other ranks' rows of a ZeRO-1 buffer are stale from then
on; fused optimizers do not raise a tensor's version), and that one is about to step parameters that a transform
replaced, or shards whose gradients are not reduced yet (its step would be lost, or wrong).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from thunder_zero.plan import Param
from thunder_zero.runtime.state import State

_states: weakref.WeakSet[State] = weakref.WeakSet()
_replaced = WeakTensorKeyDictionary()  # parameter of before a transform, or placeholder -> (its path, its state)
_placeholders = WeakTensorKeyDictionary()  # all that stand in plain modules -> their paths
_hooked = False


def watch(state: State, module: nn.Module) -> None:
    """Have the hooks look after a model's shards, and refuse steps of its plain module's parameters, from now on.

    Args:
        state: the model's.
        module: the plain module, which still has its own parameters.
    """
    global _hooked
    _states.add(state)
    for path, placeholder in state.placeholders.items():
        original = module.get_parameter(path)
        _replaced[original] = _replaced[placeholder] = (path, weakref.ref(state))
        _placeholders[placeholder] = path
    if not _hooked:
        register_optimizer_step_pre_hook(_refuse_replaced)
        register_optimizer_step_pre_hook(_refuse_open)
        register_optimizer_step_post_hook(_note_step)
        _hooked = True


def is_transformed(param: nn.Parameter) -> bool:
    """Whether the parameter is a placeholder, in a module that was transformed before."""
    return param in _placeholders


def shard_instead_of(param: Tensor) -> nn.Parameter | None:
    """The shard that took the place of a plain module's parameter, or that a placeholder stands for."""
    path, state = _replaced.get(param, (None, None))
    owner = None if state is None else state()
    return None if owner is None else owner.shards[path]


def owners_of(params: Iterable[Tensor]) -> list[tuple[State, Param] | None]:
    """Which model each of these is a shard of, and of which of its parameters; None for any other tensor."""
    owned = {id(shard): (state, path) for state in _states for path, shard in state.shards.items()}
    found = [owned.get(id(param)) for param in params]
    return [None if owner is None else (owner[0], owner[0].plan.by_name[owner[1]]) for owner in found]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer steps, in its order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def load_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """``optimizer.load_state_dict``, which takes some of the states of other kinds of optimizers, and fails in a step.

    Raises:
        ValueError: they are of another kind of optimizer, or it refuses them.
    """
    kind, before = type(optimizer).__name__, [dict(group) for group in optimizer.param_groups]
    defaults = set(optimizer.defaults)
    try:
        optimizer.load_state_dict(saved)
    except Exception as error:
        raise ValueError(
            f"{kind} does not take the optimizer state that was saved ({type(error).__name__}: {error}); give it to an "
            f"optimizer of the kind that it was saved of"
        ) from error
    for own, group in zip(before, optimizer.param_groups, strict=True):
        if missing := sorted((defaults & own.keys()) - group.keys()):
            raise ValueError(
                f"the optimizer state that was saved has no {missing[0]!r}, so it is not of {kind}; give it to an "
                f"optimizer of the kind that it was saved of"
            )
        for name, value in own.items():
            group.setdefault(name, value)  # what a scheduler or a user keeps there, and was not saved


def load_exactly(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """``load_state``, after which states have the dtypes that they were saved with.

    torch casts them to the parameter's, and a float32 momentum of a bfloat16 parameter would not be what it was.

    Raises:
        ValueError: as ``load_state``.
    """
    load_state(optimizer, saved)
    params = parameters_of(optimizer)
    for number, values in saved["state"].items():
        state = optimizer.state[params[number]]
        for name, value in values.items():
            if isinstance(value, Tensor) and name in state and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)


def _refuse_replaced(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for param in parameters_of(optimizer):
        path, state = _replaced.get(param, (None, None))
        if state is not None and state() is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds the plain module's parameter {path!r}, which is not trained since "
                f"the transform, so its step would be lost; build the optimizer on model.parameters() of the model "
                f"that thunder.jit or thunder_zero.zero returned"
            )


def _refuse_open(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state in _states:
        if path := state.open_accumulation(parameters_of(optimizer)):
            raise RuntimeError(
                f"{type(optimizer).__name__} is about to step while gradients of parameter {path!r} that no_sync "
                f"deferred were not reduced yet; run the last micro-batch, forward and backward, outside of no_sync, "
                f"or drop them with model.zero_grad()"
            )


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(param) for param in parameters_of(optimizer)}
    for state in _states:
        state.mark_stale(path for path, shard in state.shards.items() if id(shard) in stepped)

"""Functions for any optimizer of shards, and hooks before and after every step.

Before a step, hooks raise for parameters that a transform replaced, shards whose gradients are not reduced yet, shards
that hold averages, and states of another rank. After a step, hooks bump the versions of rows, so that autograd detects
a backward whose forward read the old values. They also mark other ranks' rows in ZeRO-1's buffers as stale. If torch
fails in a step, a hook adds a note that names ``tz.whole``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cache
from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from thunder_zero.compat.accelerate import guard_files
from thunder_zero.compat.torch.optimizers import on_failed_steps, share_found_inf
from thunder_zero.sharded import sharded_model
from thunder_zero.sharded.dtensors import part_of, require_own
from thunder_zero.sharded.param import ShardedParam
from thunder_zero.sharded.sharded_model import MIXED
from thunder_zero.sharded.state import State
from thunder_zero.sharded.unsliced import require_equal_gradients_once


class StepsWhole(Optimizer):
    """An optimizer over shards in which each parameter has an owner: the rank that steps it whole and has its state."""

    kind: str  # the name of the ordinary optimizer's class

    @abstractmethod
    def owner_of(self, shard: Tensor) -> int | None:
        """Return the owner, as an index among the ranks of a replica; None in a ``frozen_format``."""


def with_saved_dtypes(loaded: Any, saved: Any) -> Any:
    """Return a loaded state in its saved dtypes, since torch casts loaded states to the parameter's dtype."""
    if isinstance(loaded, Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict):
        return {key: with_saved_dtypes(value, saved[key]) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple):
        pairs = zip(loaded, saved, strict=True)
        return type(loaded)(with_saved_dtypes(value, saved_value) for value, saved_value in pairs)
    return loaded


def class_name(optimizer: Optimizer) -> str:
    return optimizer.kind if isinstance(optimizer, StepsWhole) else type(optimizer).__name__


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def param_shaped_states(states: Iterable[tuple[Mapping[str, Any], Tensor]]) -> set[str]:
    """Return the names of states with the shape of their parameter, unless it is 0-dim, as a count of steps is."""
    triples = [(name, value, param) for values, param in states for name, value in values.items() if param.ndim]
    return {name for name, value, param in triples if isinstance(value, Tensor) and value.shape == param.shape}


def load_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a state dict. Raise ValueError if another kind of optimizer saved it, with which torch may fail later."""
    kind, old_groups = class_name(optimizer), [dict(group) for group in optimizer.param_groups]
    defaults = set(optimizer.defaults)
    try:
        optimizer.load_state_dict(saved)
    except Exception as error:
        raise ValueError(
            f"{kind} refuses the saved optimizer state ({type(error).__name__}: {error}); load it into an optimizer of "
            f"the kind that saved it"
        ) from error
    for old_group, group in zip(old_groups, optimizer.param_groups, strict=True):
        if missing := sorted((defaults & old_group.keys()) - group.keys()):
            raise ValueError(
                f"the saved optimizer state has no {missing[0]!r}, so it is not of {kind}; load it into an optimizer "
                f"of the kind that saved it"
            )
        for name, value in old_group.items():
            group.setdefault(name, value)  # entries of a scheduler or a user that were not saved


def load_exactly(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Load a state dict, and keep the saved dtypes, since torch casts states to the parameter's dtype."""
    load_state(optimizer, saved)
    params = parameters_of(optimizer)
    for number, values in saved["state"].items():
        optimizer.state[params[number]] = with_saved_dtypes(optimizer.state[params[number]], values)


def watch(state: State, module: nn.Module) -> None:
    """Register a model, so that the hooks around steps know its shards and the parameters that they replaced."""
    sharded_model.register(state, module)
    guard_files(_refuse_model_file, _refuse_optimizer_files)
    _hook_steps()


@cache
def _hook_steps() -> None:
    """Register the hooks of all optimizers, once in the process.

    A model's own tensors do not see a step: torch.optim.AdamW steps DTensors without bumping a version, so backward
    would silently use stale values of forward.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_note_step)
    on_failed_steps(_explain)
    share_found_inf(_has_gradient_of_shard)


def _has_gradient_of_shard(grads: Iterable[Tensor]) -> bool:
    ids = {id(param.shard.grad) for state in sharded_model.states() for param in state.params.values()}
    return not ids.isdisjoint(map(id, grads))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    guard_files(_refuse_model_file, _refuse_optimizer_files)  # Accelerate may be imported at any time
    _refuse_replaced(optimizer)
    stepped = _stepped(optimizer)
    _refuse_early(optimizer, stepped)
    _check_first_step(optimizer, stepped)
    for state in stepped:
        if (begin := state.before_first_step) is not None:
            state.before_first_step = None
            begin()


def _stepped(optimizer: Optimizer) -> dict[State, list[ShardedParam]]:
    """Return the parameters that an optimizer steps, by model. Every step asks twice, and a tensor hashes slowly."""
    ids, found = set(map(id, parameters_of(optimizer))), dict[State, list[ShardedParam]]()
    for state in sharded_model.states():
        if params := [param for param in state.params.values() if id(param.shard) in ids]:
            found[state] = params
    return found


def _refuse_replaced(optimizer: Optimizer) -> None:
    for _, param in sharded_model.replaced_among(parameters_of(optimizer)):
        raise RuntimeError(
            f"{type(optimizer).__name__} holds the plain module's parameter {param.path!r}, which the transform "
            f"replaced, so its step would be lost; build the optimizer on model.parameters() of the model that "
            f"thunder.jit or thunder_zero.compile returned"
        )


def _refuse_early(optimizer: Optimizer, stepped: Mapping[State, list[ShardedParam]]) -> None:
    """Raise RuntimeError if the parameters' gradients are not reduced yet, or if the parameters hold averages."""
    action = f"step {type(optimizer).__name__}"
    for state, params in stepped.items():
        state.require_reduced(action, params)
    for state in sharded_model.states():
        if state.averaged and not state.averaged.isdisjoint(parameters_of(optimizer)):
            state.require_own_values(action)


def _check_first_step(optimizer: Optimizer, stepped: Mapping[State, list[ShardedParam]]) -> None:
    """Check an optimizer before its first step of shards. Register a hook that checks its states after each load."""
    hooks = getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None)  # a wrapper may lack the attribute
    if (hooks and _take_own_states in hooks.values()) or not stepped:
        return
    for state, params in stepped.items():
        require_equal_gradients_once(state, params)
    _take_own_states(optimizer)
    if hooks is not None:
        optimizer.register_load_state_dict_post_hook(_take_own_states)


def _refuse_model_file(model: object) -> None:
    if isinstance(model, sharded_model.ShardedModel) and any(param.spec for param in model.state.params.values()):
        raise _written_by_accelerate(f"the state dict of {type(model.plain).__name__}")


def _refuse_optimizer_files(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        if any(map(sharded_model.owner_of, parameters_of(optimizer))):
            raise _written_by_accelerate(f"the state of {class_name(optimizer)}")


def _written_by_accelerate(contents: str) -> RuntimeError:
    return RuntimeError(
        f"Accelerate writes {contents} on one rank, and each rank holds its own rows; let "
        f"thunder_zero.hugging_face.sharded(Accelerator)(...) prepare the model, or call tz.save and "
        f"tz.full_state_dict on all ranks (docs/hugging-face.md)"
    )


def _take_own_states(optimizer: Optimizer) -> None:
    """Replace full states by this rank's rows. Raise ValueError if states belong to another rank."""
    if isinstance(optimizer, StepsWhole):
        return
    params_and_states = [
        (param, optimizer.state[param]) for param in parameters_of(optimizer) if param in optimizer.state
    ]
    names = param_shaped_states((states, param) for param, states in params_and_states)
    for param, states in params_and_states:
        for name, value in states.items():
            require_own(value, param, f"the state {name!r} of a parameter of shape {tuple(param.shape)}")
            if name in names and value.shape == param.shape:
                states[name] = part_of(value, param)


def _note_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Bump versions and mark stale rows, since a step of DTensors does neither. This is a hook after every step."""
    for state, params in _stepped(optimizer).items():
        increment_version([param.rows for param in params])
        state.expire(params)


def _explain(optimizer: Optimizer, error: BaseException) -> None:
    if isinstance(optimizer, StepsWhole) or getattr(error, "__notes__", None) or not _is_of_dtensors(error):
        return
    owners = [[*map(sharded_model.owner_of, group["params"])] for group in optimizer.param_groups]
    if any(map(any, owners)):
        mixed_group = next(
            (number for number, group_owners in enumerate(owners) if any(group_owners) and not all(group_owners)), None
        )
        error.add_note(f"thunder_zero: {_plain_gradient(optimizer) or _advice(optimizer, str(error), mixed_group)}")


def _plain_gradient(optimizer: Optimizer) -> str | None:
    for shard in parameters_of(optimizer):
        if isinstance(shard, DTensor) and shard.grad is not None and not isinstance(shard.grad, DTensor):
            return f"a shard of shape {tuple(shard.shape)} has a plain .grad; make it by torch.zeros_like(param)"
    return None


def _advice(optimizer: Optimizer, error: str, mixed_group: int | None) -> str:
    """Return advice for an error in a step. ``mixed_group`` is the index of a group with shards and plain tensors."""
    kind = type(optimizer).__name__
    if mixed_group is not None and MIXED in error:
        return (
            f"group {mixed_group} of {kind} has shards, and plain tensors such as parameters that the policy ignores, "
            f"which torch does not step in one list; put the plain ones into a group of their own"
        )
    for option in ("fused", "foreach"):
        if f"_{option}_" in error and any(group.get(option) for group in optimizer.param_groups):
            return f"torch has no rule for the {option} step of {kind} on shards; leave {option}=True out"
    return (
        f"torch cannot take this step of {kind} on shards; step whole parameters instead, with tz.whole({kind}, "
        f"params, ...) in place of {kind}(params, ...), for the same params and options"
    )


def _is_of_dtensors(error: BaseException) -> bool:
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return MIXED in str(error) or frames[-1].f_globals.get("__name__", "").startswith("torch.distributed.tensor.")

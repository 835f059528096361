"""Makes the state dict of a sharded model's optimizers as FSDP2 has it, by parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from thunder_zero.comm.agree import all_or_none, broadcast, require_same
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.rows import own_rows
from thunder_zero.runtime.optimizers import StepsWhole, parameters_of, state_is_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import (
    GROUPS,
    STATE,
    ModelContents,
    Named,
    all_named_groups,
    named_groups,
    named_states,
    state_facts,
)
from thunder_zero.state_dict.get_model import is_returned, rows_value, unsharded_value


def make_states(optimizer: Optimizer) -> None:
    """Make the state of an optimizer that never stepped, as torch's functions do, so that there is something to load
    into: one step with zero gradients and a learning rate of zero.

    An optimizer with gradients is left alone: it may be one that never has a state, and its gradients are to be used.
    """
    if isinstance(optimizer, StepsWhole):
        optimizer.make_states()
        return
    params = parameters_of(optimizer)
    if optimizer.state or any(param.grad is not None for param in params):
        return
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for param in params:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
        optimizer.step(closure=None)
    finally:
        for group, rate in rates:
            group["lr"] = rate  # the same object: a scheduler may hold the tensor
        optimizer.zero_grad(set_to_none=True)


def with_whole_states(
    state: State, of_all: Sequence[tuple[Named, Mapping[str, Any]]]
) -> list[tuple[Named, Mapping[str, Any]]]:
    """The same states, with those that one rank alone has on all ranks; a collective.

    A tensor is an :class:`Elsewhere` on the other ranks: :func:`state_value` sends one at a time.
    """
    if all(named.owner is None for named, _ in of_all):
        return list(of_all)
    plan = state.plan
    mine = {
        named.name: {key: Elsewhere.of(value) for key, value in values.items()}
        for named, values in of_all
        if named.owner == plan.rank
    }
    everywhere = all_gather_object(mine, state.group)
    first_copy = [everywhere[rank] for rank in state.ranks.first_copy]
    return [
        (named, values if named.owner in (None, plan.rank) else first_copy[named.owner].get(named.name, {}))
        for named, values in of_all
    ]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tensor that another rank has."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(value: Any) -> Any:
        """What other ranks hear of a value: all of it, unless it is a tensor with dimensions."""
        if not isinstance(value, Tensor):
            return value
        return Elsewhere(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()


def whole_state_value(state: State, named: Named, value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of a state that one rank has; a collective if it is a tensor with dimensions."""
    assert named.owner is not None
    if not isinstance(value, Tensor | Elsewhere):
        return deepcopy(value) if options.full_state_dict else value
    if isinstance(value, Tensor) and not value.ndim:
        return unsharded_value(value, options)
    param, source = named.param, state.ranks.first_copy[named.owner]
    full = torch.empty(value.shape, dtype=value.dtype, device=state.device)
    if isinstance(value, Tensor):
        full.copy_(value)
    broadcast(full, source, state.group, state.device)
    if param is not None and param.sharded and tuple(full.shape) == param.shape and not options.full_state_dict:
        return rows_value(state, param, own_rows(full, param, state.plan), options)
    return unsharded_value(full if is_returned(state, options) else full.new_empty(0), options)


def state_value(state: State, named: Named, key: str, value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of one state; a collective if the state is rows, and the options ask for full tensors, or
    if it is a tensor that one rank alone has.

    Raises:
        ValueError: neither rows nor one number, so that no full state can be made.
    """
    param = named.param
    if named.owner is not None:
        return whole_state_value(state, named, value, options)
    if param is not None and state_is_rows(key, value, param, state.plan):
        return rows_value(state, param, value, options)
    return unsharded_value(value, options)


@torch.no_grad()
def make_optimizer_state_dict(
    state: State, contents: ModelContents, optimizers: Sequence[Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """States by parameter name, and groups with names; or flattened. Empty without optimizers. A collective.

    Raises:
        ValueError: a parameter that is not the model's; a state that is neither rows nor one number.
        RuntimeError: another rank refused, or its optimizer has other states.
    """
    if not optimizers:
        return {}
    with all_or_none(state.group, "the optimizer"):
        all_named_groups(contents, optimizers)  # refuses before any optimizer steps
    for optimizer in optimizers:
        with all_or_none(state.group, "the optimizer"):
            make_states(optimizer)
    with all_or_none(state.group, "the optimizer"):
        of_all = named_states(contents, optimizers)
        facts = state_facts(contents, optimizers)
    require_same(facts, state.group)
    of_all = with_whole_states(state, of_all)
    states = {
        named.name: {key: state_value(state, named, key, value, options) for key, value in values.items()}
        for named, values in of_all
        if values
    }
    groups = [
        {key: unsharded_value(value, options) for key, value in group.items()}
        | {"params": [named.name for named in members]}
        for optimizer in optimizers
        for group, members in zip(optimizer.param_groups, named_groups(contents, optimizer), strict=True)
    ]
    if not is_returned(state, options):
        return {}
    return flattened(states, groups) if options.flatten_optimizer_state_dict else {STATE: states, GROUPS: groups}


def flattened(states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten as torch does: ``"state.0.weight.exp_avg"``, and the group's values once for each of its parameters,
    ``"param_groups.0.weight.lr"``, so that flat state dicts of several optimizers can be merged."""
    flat = {f"{STATE}.{name}.{key}": value for name, of in states.items() for key, value in of.items()}
    for group in groups:
        values = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"{GROUPS}.{name}.{key}": value for name in group["params"] for key, value in values.items()}
    return flat

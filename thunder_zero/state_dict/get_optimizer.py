"""Makes the state dict of a sharded model's optimizers as FSDP2 has it, by parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from thunder_zero.comm.agree import all_or_none, require_same
from thunder_zero.plan import Param
from thunder_zero.runtime.optimizers import parameters_of, state_is_rows
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.contents import (
    GROUPS,
    STATE,
    ModelContents,
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


def state_value(state: State, param: Param | None, key: str, value: Any, options: StateDictOptions) -> Any:
    """The state dict's value of one state; a collective if the state is rows, and the options ask for full tensors.

    Raises:
        ValueError: neither rows nor one number, so that no full state can be made.
    """
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
            make_states(optimizer)
        of_all = named_states(contents, optimizers)
        facts = state_facts(contents, optimizers)
    require_same(facts, state.group)
    states = {
        named.name: {key: state_value(state, named.param, key, value, options) for key, value in values.items()}
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

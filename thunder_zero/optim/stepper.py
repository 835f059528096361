"""Steps an ordinary optimizer on the whole parameters that this rank owns in one bucket.

Between steps, the ordinary optimizer's parameters have shapes and no memory. Its states are aliases of the states of
the optimizer over the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from thunder_zero.compat.torch.optimizers import step_alone
from thunder_zero.optim.exchange import Member, ParamAndGrad
from thunder_zero.optim.options import attributes_of, describe_values, hyper_parameters
from thunder_zero.plan.params import Param
from thunder_zero.sharded.dtensors import parameter_like, with_attributes_of

MakeOptimizer = Callable[..., Optimizer]  # takes parameters or groups, and options, as torch's classes do
Groups = Sequence[Mapping[str, Any]]
UserOptions = Sequence[Collection[str]]  # for each group, the options that the user set, not those of schedulers
GroupedParams = Sequence[tuple[int, str | None, Tensor]]  # a group's number, a name if groups have names, a parameter


def copy_values(value: Any) -> Any:
    """Copy the tensors and collections of a value, which a step may change in place."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def params_entry(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's parameters for a constructor, with names if the parameters have names."""
    params = group["params"]
    return {"params": list(zip(group["param_names"], params, strict=True)) if "param_names" in group else list(params)}


def group_to_construct(
    group: Mapping[str, Any], user_options: Collection[str], number: int, params: GroupedParams, *, named: bool
) -> dict[str, Any]:
    """Build a group with the options that the user set, since a constructor may not accept others."""
    members = [(name, param) for group_number, name, param in params if group_number == number]
    names = {"param_names": [name for name, _ in members]} if named else {}
    options = {key: group[key] for key in user_options if key in group}
    return {"params": [param for _, param in members], **names, **options}


def make_optimizer(
    make: MakeOptimizer,
    options: Mapping[str, Any],
    groups: Groups,
    user_options: UserOptions,
    params: GroupedParams,
    *,
    named: bool,
) -> Optimizer:
    """Build an optimizer. The constructor gets only the options that the user set. Then all options are set."""
    to_construct = [
        group_to_construct(group, keys, number, params, named=named)
        for number, (group, keys) in enumerate(zip(groups, user_options, strict=True))
    ]
    optimizer = make(to_construct, **options)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"tz.whole was given {make!r:.80}, which makes a {type(optimizer).__name__}; give a class of "
            f"torch.optim.Optimizer"
        )
    if len(optimizer.param_groups) != len(groups):
        raise ValueError(
            f"{type(optimizer).__name__} makes {len(optimizer.param_groups)} groups of the {len(groups)} that it was "
            f"given, so tz.whole cannot tell their parameters apart; give tz.whole each of its groups, or each of the "
            f"optimizers that it combines"
        )
    for new_group, group in zip(optimizer.param_groups, groups, strict=True):
        new_group.update(group)
    return optimizer


def blank_param(param: Param, shard: Tensor) -> nn.Parameter:
    """Return a parameter with the full shape and the attributes of its shard, in the memory of one element."""
    return parameter_like(shard, torch.zeros((), dtype=param.dtype, device=shard.device).expand(param.shape))


class BucketStepper:
    """The parameters of one bucket, and the ordinary optimizer that steps this rank's share of the bucket."""

    def __init__(
        self, make: MakeOptimizer, options: Mapping[str, Any], members: Sequence[Member], rank: int, *, named: bool
    ) -> None:
        self.members, self._make, self._options, self._named = members, make, options, named
        self._owned = [(member, blank_param(member.param, member.shard)) for member in members if member.owner == rank]
        self._optimizer: Optimizer | None = None
        self._attributes: dict[str, str] = {}

    def members_at(self, paths: Collection[str]) -> list[Member]:
        return [member for member in self.members if member.param.path in paths]

    def step(
        self,
        values: Mapping[str, ParamAndGrad],
        groups: Groups,
        user_options: UserOptions,
        states: MutableMapping[Any, Any],
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Step the parameters that have values. Update ``states``. Return the stepped parameters and the options."""
        for member, param in self._owned:
            if (arrived := values.get(member.param.path)) is not None:
                param.data, param.grad = arrived
            with_attributes_of(param, member.shard)
        try:
            optimizer = self._with_groups(groups, user_options, states)
            for member, param in self._owned:
                if member.shard in states:
                    optimizer.state[param] = states[member.shard]
                else:
                    optimizer.state.pop(param, None)
            step_alone(optimizer)  # without global hooks, which already run for the optimizer over the shards
            shards: dict[Any, Tensor] = {param: member.shard for member, param in self._owned}
            for key, state in optimizer.state.items():
                states[shards.get(key, key)] = state
            updated = {member.param.path: param.data for member, param in self._owned if member.param.path in values}
            return updated, [hyper_parameters(group) for group in optimizer.param_groups]
        finally:
            for member, param in self._owned:
                param.grad = None
                param.data = blank_param(member.param, member.shard).data

    def changed_attributes(self) -> list[str]:
        """Return the names of the ordinary optimizer's attributes that its steps have changed, such as a count."""
        current = {} if self._optimizer is None else describe_values(attributes_of(self._optimizer))
        return sorted(name for name, value in current.items() if self._attributes.get(name, value) != value)

    def _with_groups(self, groups: Groups, user_options: UserOptions, states: MutableMapping[Any, Any]) -> Optimizer:
        """Return the ordinary optimizer with the current groups. The first step builds it, since it may read values."""
        params = [(member.group, member.name, param) for member, param in self._owned]
        if self._optimizer is None:
            self._optimizer = make_optimizer(self._make, self._options, groups, user_options, params, named=self._named)
            self._attributes = describe_values(attributes_of(self._optimizer))
            for member, param in self._owned:
                if param in self._optimizer.state:  # the constructor set it; a loaded state takes precedence
                    states.setdefault(member.shard, self._optimizer.state[param])
        for number in range(len(self._optimizer.param_groups), len(groups)):
            self._optimizer.add_param_group(
                group_to_construct(groups[number], user_options[number], number, params, named=self._named)
            )
        for ordinary_group, group in zip(self._optimizer.param_groups, groups, strict=True):
            ordinary_group.update(group)
        return self._optimizer

"""Steps an ordinary optimizer on the whole parameters of one bucket that this rank owns.

Between steps its parameters have their shapes and no memory; its states are those of the optimizer over the shards, by
reference, and its hyper-parameters are copied from there before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from thunder_zero.compat.torch.optimizers import step_alone
from thunder_zero.optim.options import attributes_of, hyper_parameters, in_words
from thunder_zero.optim.owners import Member, Values
from thunder_zero.plan.params import Param
from thunder_zero.sharded.attributes import parameter_like, with_attributes_of

Make = Callable[..., Optimizer]  # as torch's classes: called with parameters or groups, and options
Groups = Sequence[Mapping[str, Any]]
Given = Sequence[Collection[str]]  # of each group the options that the user gave; schedulers and classes add others
GroupedParams = Sequence[
    tuple[int, str | None, Tensor]
]  # the number of a group, a name if groups have names, a parameter


def copied(value: Any) -> Any:
    """A copy of what a step may change in place: tensors and collections."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def parameters_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's parameters, as an optimizer's constructor takes them: with their names, if they have any."""
    params = group["params"]
    return {"params": list(zip(group["param_names"], params, strict=True)) if "param_names" in group else list(params)}


def as_given(
    group: Mapping[str, Any], given: Collection[str], number: int, members: GroupedParams, *, named: bool
) -> dict[str, Any]:
    """A group as a constructor takes it, of those members that are of this number: with the options that the user gave,
    as they are now, since constructors may refuse others; with names if groups have names."""
    own = [(name, param) for of, name, param in members if of == number]
    names = {"param_names": [name for name, _ in own]} if named else {}
    return {"params": [param for _, param in own], **names, **{key: group[key] for key in given if key in group}}


def made(
    make: Make, options: Mapping[str, Any], groups: Groups, given: Given, members: GroupedParams, *, named: bool
) -> Optimizer:
    """An optimizer of these parameters, as a user makes it: the constructor gets the options that the user gave, and
    groups the others later."""
    of_groups = range(len(groups))
    optimizer = make([as_given(groups[at], given[at], at, members, named=named) for at in of_groups], **options)
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
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update(group)
    return optimizer


def blank(param: Param, shard: Tensor) -> nn.Parameter:
    """A parameter like its shard, of the full shape, that takes the memory of one element."""
    return parameter_like(shard, torch.zeros((), dtype=param.dtype, device=shard.device).expand(param.shape))


class BucketStepper:
    """Parameters that travel together, and the ordinary optimizer of those that this rank owns; it is made in the first
    step, when there are values."""

    def __init__(
        self, make: Make, options: Mapping[str, Any], members: Sequence[Member], rank: int, *, named: bool
    ) -> None:
        self.members, self._make, self._options, self._named = members, make, options, named
        self._owned = [(of, blank(of.param, of.shard)) for of in members if of.owner == rank]
        self._optimizer: Optimizer | None = None
        self._attributes: dict[str, str] = {}

    def of_paths(self, paths: Collection[str]) -> list[Member]:
        """The parameters of these paths."""
        return [member for member in self.members if member.param.path in paths]

    def step(
        self, values: Mapping[str, Values], groups: Groups, given: Given, states: MutableMapping[Any, Any]
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Step the parameters that have values; returns them by path, and the groups' hyper-parameters after the step.
        It may write to the values, and updates ``states``, by shard or by whatever else the optimizer keeps."""
        for of, param in self._owned:
            if (found := values.get(of.param.path)) is not None:
                param.data, param.grad = found.param, found.grad
            with_attributes_of(param, of.shard)
        try:
            optimizer = self._with_groups(groups, given, states)
            self._give_states(optimizer, states)
            step_alone(optimizer)  # hooks of all optimizers belong to the one over the shards
            self._take_states(optimizer, states)
            updated = {of.param.path: param.data for of, param in self._owned if of.param.path in values}
            return updated, [hyper_parameters(group) for group in optimizer.param_groups]
        finally:
            for of, param in self._owned:
                param.grad = None
                param.data = blank(of.param, of.shard).data

    def moved_attributes(self) -> list[str]:
        """The attributes of the optimizer that its steps have changed, such as a count."""
        now = {} if self._optimizer is None else in_words(attributes_of(self._optimizer))
        return sorted(name for name, value in now.items() if self._attributes.get(name, value) != value)

    def _with_groups(self, groups: Groups, given: Given, states: MutableMapping[Any, Any]) -> Optimizer:
        members = [(of.group, of.name, param) for of, param in self._owned]
        if self._optimizer is None:
            self._optimizer = made(self._make, self._options, groups, given, members, named=self._named)
            self._attributes = in_words(attributes_of(self._optimizer))
            for of, param in self._owned:
                if param in self._optimizer.state:  # made with the parameter, and perhaps loaded since
                    states.setdefault(of.shard, self._optimizer.state[param])
        for at in range(len(self._optimizer.param_groups), len(groups)):
            self._optimizer.add_param_group(as_given(groups[at], given[at], at, members, named=self._named))
        for own, group in zip(self._optimizer.param_groups, groups, strict=True):
            own.update(group)
        return self._optimizer

    def _give_states(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
        for of, param in self._owned:
            if of.shard in states:
                optimizer.state[param] = states[of.shard]
            else:
                optimizer.state.pop(param, None)

    def _take_states(self, optimizer: Optimizer, states: MutableMapping[Any, Any]) -> None:
        shards: dict[Any, Tensor] = {param: of.shard for of, param in self._owned}
        for key, state in optimizer.state.items():
            states[shards.get(key, key)] = state

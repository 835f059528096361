"""Steps an ordinary optimizer on the whole parameters of one bucket that this rank owns.

Between steps its parameters have their shapes and no memory; its states are those of the optimizer over the shards, by
reference, and its hyper-parameters are copied from there before each step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.marks import marked, parameter_like
from thunder_zero.plan import Param
from thunder_zero.runtime.optimizers import hyper_parameters, without_hooks
from thunder_zero.whole_step.exchange import Values
from thunder_zero.whole_step.sentences import makes_no_optimizer, makes_own_groups
from thunder_zero.whole_step.words import attributes_of, in_words

Make = Callable[..., Optimizer]  # as torch's classes: called with parameters or groups, and options
Groups = Sequence[Mapping[str, Any]]
Given = Sequence[Collection[str]]  # of each group the options that the user gave; schedulers and classes add others
Members = Sequence[tuple[int, str | None, Tensor]]  # the number of a group, a name if groups have names, a parameter


@dataclass(frozen=True, eq=False)
class Owned:
    """A parameter that this rank owns.

    Attributes:
        param: its entry in the plan.
        shard: the key of its states.
        group: the number of its group.
        name: its name in the group, if the group has names.
    """

    param: Param
    shard: Tensor
    group: int
    name: str | None = None


def copied(value: Any) -> Any:
    """A copy of what a step may change in place: tensors and collections."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(copied, value))
    return value


def only(group: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The options of a group that the user gave, as they are now: constructors may refuse others."""
    return {key: group[key] for key in given if key in group}


def parameters_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's parameters, as an optimizer's constructor takes them: with their names, if they have any."""
    params = group["params"]
    return {"params": list(zip(group["param_names"], params, strict=True)) if "param_names" in group else list(params)}


def members_in(number: int, members: Members, *, named: bool) -> dict[str, Any]:
    """The parameters of a group, which may be none; with their names if groups have names."""
    own = [(name, param) for group, name, param in members if group == number]
    names = {"param_names": [name for name, _ in own]} if named else {}
    return {"params": [param for _, param in own], **names}


def made(
    make: Make, options: Mapping[str, Any], groups: Groups, given: Given, members: Members, *, named: bool
) -> Optimizer:
    """An optimizer of these parameters, as a user makes it: the constructor gets the options that the user gave, and
    groups the others later.

    Args:
        make: makes it.
        options: of ``make``.
        groups: the options of all groups.
        given: of each group the options that the user gave.
        members: its parameters.
        named: groups have the names of their parameters.

    Raises:
        TypeError: not an optimizer.
        ValueError: it makes other groups.
        Exception: raised by ``make``.
    """
    taken = [only(group, keys) for group, keys in zip(groups, given, strict=True)]
    optimizer = make([{**members_in(at, members, named=named), **group} for at, group in enumerate(taken)], **options)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(makes_no_optimizer(make, optimizer))
    if len(optimizer.param_groups) != len(groups):
        raise ValueError(makes_own_groups(type(optimizer).__name__, len(optimizer.param_groups), len(groups)))
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update(group)
    return optimizer


def blank(param: Param, shard: Tensor) -> nn.Parameter:
    """A parameter like its shard, of the full shape, that takes the memory of one element."""
    return parameter_like(shard, torch.zeros((), dtype=param.dtype, device=shard.device).expand(param.shape))


class Stepper:
    """The ordinary optimizer of one bucket on one rank; it is made in the first step, when there are values.

    Args:
        make: makes it.
        options: of ``make``.
        owned: the bucket's parameters that this rank owns.
        named: groups have the names of their parameters.
    """

    def __init__(self, make: Make, options: Mapping[str, Any], owned: Sequence[Owned], *, named: bool) -> None:
        self._make, self._options, self._owned, self._named = make, options, owned, named
        self._params = [blank(of.param, of.shard) for of in owned]
        self._optimizer: Optimizer | None = None
        self._attributes: dict[str, str] = {}

    def step(
        self, values: Mapping[str, Values], groups: Groups, given: Given, states: MutableMapping[Any, Any]
    ) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """Step the parameters that have values.

        Args:
            values: by path; the optimizer may write to them.
            groups: the hyper-parameters of all groups, without parameters and their names.
            given: which of them a constructor takes.
            states: by shard, or by whatever else the optimizer keeps; updated.

        Returns:
            The updated parameters by path, and the groups' hyper-parameters after the step.
        """
        for of, param in zip(self._owned, self._params, strict=True):
            if (found := values.get(of.param.path)) is not None:
                param.data, param.grad = found.param, found.grad
            marked(param, of.shard)
        try:
            optimizer = self._with_groups(groups, given, states)
            self._give_states(optimizer, states)
            with without_hooks():  # they belong to the optimizer over the shards
                optimizer.step()
            self._take_states(optimizer, states)
            pairs = zip(self._owned, self._params, strict=True)
            updated = {of.param.path: param.data for of, param in pairs if of.param.path in values}
            return updated, [hyper_parameters(group) for group in optimizer.param_groups]
        finally:
            for of, param in zip(self._owned, self._params, strict=True):
                param.grad = None
                param.data = blank(of.param, of.shard).data

    def moved_attributes(self) -> list[str]:
        """The attributes of the optimizer that its steps have changed, such as a count."""
        now = {} if self._optimizer is None else in_words(attributes_of(self._optimizer))
        return sorted(name for name, value in now.items() if self._attributes.get(name, value) != value)

    def _with_groups(self, groups: Groups, given: Given, states: MutableMapping[Any, Any]) -> Optimizer:
        """The optimizer with these hyper-parameters."""
        pairs = zip(self._owned, self._params, strict=True)
        members = [(of.group, of.name, param) for of, param in pairs]
        if self._optimizer is None:
            self._optimizer = made(self._make, self._options, groups, given, members, named=self._named)
            self._attributes = in_words(attributes_of(self._optimizer))
            for of, param in zip(self._owned, self._params, strict=True):
                if param in self._optimizer.state:  # made with the parameter, and perhaps loaded since
                    states.setdefault(of.shard, self._optimizer.state[param])
        for at in range(len(self._optimizer.param_groups), len(groups)):
            of_group = members_in(at, members, named=self._named)
            self._optimizer.add_param_group({**of_group, **only(groups[at], given[at])})
        for own, group in zip(self._optimizer.param_groups, groups, strict=True):
            own.update(group)
        return self._optimizer

    def _give_states(self, optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
        for of, param in zip(self._owned, self._params, strict=True):
            if of.shard in states:
                optimizer.state[param] = states[of.shard]
            else:
                optimizer.state.pop(param, None)

    def _take_states(self, optimizer: Optimizer, states: MutableMapping[Any, Any]) -> None:
        shards: dict[Any, Tensor] = {param: of.shard for of, param in zip(self._owned, self._params, strict=True)}
        for key, state in optimizer.state.items():
            states[shards.get(key, key)] = state

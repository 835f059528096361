"""Finds the model and the parameters of ``tz.whole``; makes the optimizer that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero.runtime.couplings import refuse_coupled_parameters
from thunder_zero.runtime.probe import undisturbed
from thunder_zero.runtime.registry import owners_of, replaced_path
from thunder_zero.runtime.state import State
from thunder_zero.whole_step.exchange import Member
from thunder_zero.whole_step.owners import Piece, WorkOf, assign
from thunder_zero.whole_step.sentences import steps_no_empty_group
from thunder_zero.whole_step.stepper import Make, Stepper, blank, copied, hyper_parameters

Groups = Sequence[Mapping[str, Any]]


class _Listed(Optimizer):
    """Lists parameters in groups, as torch does for every optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def listed(params: Iterable[Any]) -> Groups:
    """The groups of parameters, named parameters or groups, with lists of parameters.

    Raises:
        TypeError, ValueError: torch refuses them, such as one parameter in two groups.
    """
    return _Listed(params, {}).param_groups


def model_of(shards: Sequence[Tensor], state: State | None = None) -> State:
    """The model that all of these parameters belong to.

    Args:
        shards: the parameters.
        state: the model's, if it is known.

    Raises:
        ValueError: a parameter that is not a sharded model's, or of another one; no parameter.
    """
    for shard, owner in zip(shards, owners_of(shards), strict=True):
        if owner is None:
            path = replaced_path(shard)
            what = f"the plain module's {path!r}" if path is not None else f"of shape {tuple(shard.shape)}"
            raise ValueError(
                f"tz.whole was given a parameter ({what}) that is not one of a sharded model's: take them from "
                f"model.parameters() of the model that thunder.jit or thunder_zero.zero returned, and give those that "
                f"the policy ignores to an optimizer of their own"
            )
        state = owner[0] if state is None else state
        if owner[0] is not state:
            raise ValueError(
                f"tz.whole was given parameter {owner[1].path!r} of {owner[0].name} and parameters of {state.name}; "
                f"make one for each model"
            )
    if state is None:
        raise ValueError("tz.whole was given groups without parameters; give it parameters of a sharded model")
    return state


def ordinary(make: Make, groups: Groups, options: Mapping[str, Any], state: State) -> tuple[Optimizer, frozenset[str]]:
    """The ordinary optimizer of parameters of full shapes, which take no memory: every rank sees all of them, and so
    gets the same defaults, and the same errors. And the options of groups that its own steps change.

    Raises:
        TypeError: not an optimizer.
        ValueError: its step needs a closure, or fails on groups without parameters; it makes other groups.
        RuntimeError: it couples parameters, or cannot be probed.
        Exception: raised by ``make``.
    """
    shards = [shard for group in groups for shard in group["params"]]
    owners = [owner for owner in owners_of(shards) if owner is not None]
    like = {id(shard): blank(param, shard) for shard, (_, param) in zip(shards, owners, strict=True)}
    given = [{**of, "params": [like[id(shard)] for shard in of["params"]]} for of in groups]
    made = make(given, **options)
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"tz.whole was given {make!r}, which makes a {type(made).__name__}; give a class of torch.optim.Optimizer"
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(made).__name__} evaluates the loss several times in a step, by a closure, and tz.whole has one "
            f"gradient a step; use an optimizer whose step needs no closure"
        )
    if len(made.param_groups) != len(groups):
        raise ValueError(
            f"{type(made).__name__} makes {len(made.param_groups)} groups of the {len(groups)} that it was given, so "
            f"tz.whole cannot tell their parameters apart; give tz.whole each of its groups, or each of the optimizers "
            f"that it combines"
        )
    _require_steps_empty_groups(make, made, options, state)
    if state.plan.ranks == 1 or state.plan.policy.trust_optimizer:
        return made, frozenset()
    return made, refuse_coupled_parameters(made, state.device, state.plan.world_size, state.plan.replicas)


def _require_steps_empty_groups(make: Make, like: Optimizer, options: Mapping[str, Any], state: State) -> None:
    """Of most groups, most ranks own no parameter in most buckets.

    Raises:
        ValueError: the optimizer fails on groups without parameters.
    """
    groups = [copied(hyper_parameters(group)) for group in like.param_groups]
    stepper = Stepper(make, options, [], named="param_names" in like.param_groups[0])
    try:
        with undisturbed(state.device):
            stepper.step({}, groups, {})
    except Exception as error:
        raise ValueError(steps_no_empty_group(type(like).__name__, error)) from error


def members_of(groups: Groups, state: State, work_of: WorkOf, loads: Sequence[int]) -> list[list[Member]]:
    """The trained parameters of these groups in buckets, with their owners.

    Args:
        groups: of shards.
        state: the model's.
        work_of: the work of a whole parameter, by its shape.
        loads: the work that each rank has already.
    """
    plan = state.plan
    shards = [shard for group in groups for shard in group["params"] if shard.requires_grad]
    params = [owner[1] for owner in owners_of(shards) if owner is not None]
    pieces = [
        Piece(number, work_of(param.shape), prod(param.shape) * param.dtype.itemsize, param.dtype)
        for number, param in enumerate(params)
    ]
    buckets = assign(pieces, plan.world_size, plan.sizes.bucket_bytes, loads)
    return [
        [Member(params[at], shards[at], owner) for at, owner in zip(bucket.numbers, bucket.owners, strict=True)]
        for bucket in buckets
    ] or [[]]

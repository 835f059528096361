"""Finds the model and the parameters of ``tz.whole``; makes the optimizer that it stands for.

In: what ``tz.whole`` was given. Out: its model; the ordinary optimizer, made and probed; parameters in buckets, each
with its owner; or a refusal::

    params -> groups_of_params -> model_of       State of the model that all of them belong to
                               -> make_ordinary  an optimizer of parameters without memory, and what probe.py found
                               -> members_of     [[Member, Member], [Member]], a list for each bucket

This runs when an optimizer is made and when it gets a group. :func:`make_ordinary` also runs in a step, after options
or groups have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.optim.options import hyper_parameters, names_of
from thunder_zero.optim.owners import Member, Piece, assign, work_of_shape
from thunder_zero.optim.probe import ProbeResult, probe_optimizer
from thunder_zero.optim.stepper import (
    GroupedParams,
    Groups,
    MakeOptimizer,
    UserOptions,
    blank_param,
    copy_values,
    make_optimizer,
)
from thunder_zero.plan.params import Param
from thunder_zero.sharded.sharded_model import owner_of, owner_of_replaced
from thunder_zero.sharded.state import State


def require_maker(make: object) -> None:
    """Raise TypeError unless an object can make optimizers."""
    if isinstance(make, Optimizer) or not callable(make):
        raise TypeError(
            f"tz.whole was given a {type(make).__name__} to make optimizers with; give the class itself and then the "
            f"parameters, as in tz.whole(torch.optim.Muon, params, lr=1e-3)"
        )


def groups_of_params(params: Iterable[Any]) -> Groups:
    """Return groups with lists of parameters, from parameters, named parameters or groups."""
    if isinstance(params, nn.Module):
        raise TypeError(f"tz.whole was given a {type(params).__name__}; give it model.parameters(), or some of them")
    return Optimizer(params, {}).param_groups


def model_of(shards: Sequence[Tensor], state: State | None = None) -> State:
    """Return the model that all shards belong to.

    Args:
        state: the model's, if it is known.

    Raises:
        ValueError: a shard belongs to no model or to another one; there are none.
        RuntimeError: torch's tensor parallelism slices the model.
    """
    for shard in shards:
        owner = owner_of(shard)
        if owner is None:
            before = owner_of_replaced(shard)
            what = f"the plain module's {before[1].path!r}" if before else f"of shape {tuple(shard.shape)}"
            raise ValueError(
                f"tz.whole was given a parameter ({what}) that is not one of a sharded model's: take them from "
                f"model.parameters() of the model that thunder.jit or thunder_zero.compile returned, and give "
                f"those that the policy ignores to an optimizer of their own"
            )
        state = owner[0] if state is None else state
        if owner[0] is not state:
            raise ValueError(
                f"tz.whole was given parameter {owner[1].path!r} of {owner[0].name} and parameters of {state.name}; "
                f"make one for each model"
            )
    if state is None:
        raise ValueError("tz.whole was given groups without parameters; give it parameters of a sharded model")
    state.plan.require_unsliced("tz.whole", "give the optimizer model.parameters() itself, if it steps rows alone")
    return state


def make_ordinary(
    make: MakeOptimizer,
    groups: Groups,
    user_options: UserOptions,
    options: Mapping[str, Any],
    state: State,
    moving: Collection[str] = (),
    *,
    trusted: bool,
) -> tuple[Optimizer, ProbeResult]:
    """Make the ordinary optimizer, and probe it. All ranks get equal defaults and equal errors.

    Args:
        user_options: for each group the options that the user set.
        moving: the options of groups that steps have changed; a new optimizer has its own values of them, unless the
            user set them.
        trusted: it steps every parameter alone, whatever the probe finds.

    Returns:
        An optimizer over parameters of full shapes, which take no memory; what the probe found.

    Raises:
        ValueError: its step needs an argument, or it cannot step groups without parameters.
        RuntimeError: unless ``trusted``: it couples parameters, cannot be probed, or draws random numbers where the
            model has several copies.
    """
    kept_options = [
        {key: value for key, value in hyper_parameters(group).items() if key in keys or key not in moving}
        for group, keys in zip(groups, user_options, strict=True)
    ]

    def make_on(options_of_groups: Groups, params: GroupedParams) -> Optimizer:
        own_options = [copy_values(dict(group)) for group in options_of_groups]  # steps may change tensors in place
        named = "param_names" in groups[0]
        return make_optimizer(make, copy_values(dict(options)), own_options, user_options, params, named=named)

    blanks = [(number, name, blank_param(param, shard)) for param, shard, number, name in _planned_shards(groups)]
    optimizer = make_on(kept_options, blanks)
    _require_steppable(optimizer)
    result = probe_optimizer(make_on, optimizer, state.device)
    _require_separable(type(optimizer).__name__, result, state, trusted)
    return optimizer, result


def _planned_shards(groups: Groups) -> list[tuple[Param, Tensor, int, str | None]]:
    """List the shards of groups: entry in the plan, shard, number of the group, name in the group."""
    return [
        (owner[1], shard, number, name)
        for number, group in enumerate(groups)
        for name, shard in zip(names_of(group), group["params"], strict=True)
        if (owner := owner_of(shard)) is not None
    ]


def _require_steppable(optimizer: Optimizer) -> None:
    """Raise ValueError if a step needs an argument."""
    kind = type(optimizer).__name__
    for argument in signature(optimizer.step).parameters.values():
        if argument.default is not Parameter.empty or argument.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            continue
        raise ValueError(
            f"a step of {kind} needs the argument {argument.name!r}, such as a closure that evaluates the loss, and "
            f"tz.whole has one gradient a step; use an optimizer whose step needs no argument"
        )


def _require_separable(kind: str, found: ProbeResult, state: State, trusted: bool) -> None:
    """Raise unless each rank can step some of the parameters.

    In most buckets most ranks own no parameter of most groups, so groups without parameters must work, too.
    """
    plan = state.plan
    if found.couples and plan.mesh.shard.size > 1 and not trusted:
        raise RuntimeError(
            f"{kind} couples parameters (beside other probe parameters {found.couples}), and each rank steps only "
            f"some of them; use an optimizer that steps every parameter alone, or model.parameters() without tz.whole "
            f"if torch steps it there"
        )
    if found.fails_empty and found.fails_empty != found.unknown:
        raise ValueError(
            f"{kind} cannot step groups without parameters ({found.fails_empty}), and a rank has such a group if "
            f"others own all of its parameters; use a class that skips them"
        )
    if found.moving_if_any:
        raise ValueError(describe_uneven_option(kind, min(found.moving_if_any)))
    if found.draws and (copies := plan.mesh.replicate.size) > 1 and not trusted:
        raise RuntimeError(
            f"{kind} draws random numbers ({found.draws}), and the {copies} copies of the model would draw "
            f"other ones and drift apart; use an optimizer that draws none, or a mesh of one copy"
        )
    if found.unknown and plan.ranks > 1 and not trusted:
        raise RuntimeError(
            f"{kind} may couple parameters, and cannot be tried on probe parameters ({found.unknown}), and each rank "
            f"steps only some of them; give tz.whole trust_optimizer=True if it steps every parameter alone"
        )


def describe_uneven_option(kind: str, name: str) -> str:
    """Return the error about an option that a step changes only in groups with parameters or gradients."""
    return (
        f"{kind} changes {name!r} of a group only where it has parameters of the group to step, and ranks step "
        f"different ones, so each would have another value; let its step change it in every group, or keep it in the "
        f"states of parameters"
    )


def members_of(groups: Groups, offset: int, state: State, loads: Sequence[int]) -> list[list[Member]]:
    """Return the trained parameters of groups in buckets, with owners.

    Args:
        offset: the number of the first group.
        loads: the work that each rank has already.
    """
    plan = state.plan
    trained = [
        (param, shard, offset + number, name)
        for param, shard, number, name in _planned_shards(groups)
        if shard.requires_grad
    ]
    pieces = [
        Piece(number, work_of_shape(param.shape), prod(param.shape) * param.dtype.itemsize, param.dtype)
        for number, (param, *_) in enumerate(trained)
    ]
    return [
        [Member(*trained[number], owner) for number, owner in zip(bucket.numbers, bucket.owners, strict=True)]
        for bucket in assign(pieces, plan.mesh.shard.size, plan.sizes.bucket_bytes, loads)
    ] or [[]]

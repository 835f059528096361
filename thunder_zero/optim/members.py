"""Finds the model and the parameters of ``tz.whole``. Builds and probes the ordinary optimizer.

::

    params -> groups_of_params -> model_of       the state of the parameters' model
                               -> make_ordinary  an optimizer of parameters without memory, and the result of probe.py
                               -> members_of     [[Member, Member], [Member]], a list for each bucket
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.optim.exchange import Member
from thunder_zero.optim.options import hyper_parameters, names_of
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
from thunder_zero.plan.owners import Piece, assign, work_of_shape
from thunder_zero.plan.params import Param
from thunder_zero.sharded.sharded_model import owner_of, owner_of_replaced
from thunder_zero.sharded.state import State


def groups_of_params(params: Iterable[Any]) -> Groups:
    if isinstance(params, nn.Module):
        raise TypeError(f"tz.whole was given a {type(params).__name__}; give it model.parameters(), or some of them")
    return Optimizer(params, {}).param_groups


def model_of(shards: Sequence[Tensor], state: State | None = None) -> State:
    """Return the state of the model that all shards belong to: ``state``, if that is known."""
    for shard in shards:
        owner = owner_of(shard)
        if owner is None:
            replaced = owner_of_replaced(shard)
            label = f"the plain module's {replaced[1].path!r}" if replaced else f"of shape {tuple(shard.shape)}"
            raise ValueError(
                f"tz.whole was given a parameter ({label}) that is not one of a sharded model's: take them from "
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
    state.plan.mesh.require_unsliced("tz.whole", "give the optimizer model.parameters() itself, if it steps rows alone")
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
    """Build the ordinary optimizer over parameters without memory, and probe it. All ranks get equal results.

    The options that steps have changed (``moving``) have default values, unless the user set them.
    """
    kept_options = [
        {key: value for key, value in hyper_parameters(group).items() if key in keys or key not in moving}
        for group, keys in zip(groups, user_options, strict=True)
    ]

    def make_on(options_of_groups: Groups, params: GroupedParams) -> Optimizer:
        copied_options = [copy_values(dict(group)) for group in options_of_groups]  # steps may change tensors in place
        named = "param_names" in groups[0]
        return make_optimizer(make, copy_values(dict(options)), copied_options, user_options, params, named=named)

    blanks = [(number, name, blank_param(param, shard)) for param, shard, number, name in _planned_shards(groups)]
    optimizer = make_on(kept_options, blanks)
    _require_steppable(optimizer)
    result = probe_optimizer(make_on, optimizer, state.device)
    _require_separable(type(optimizer).__name__, result, state, trusted)
    return optimizer, result


def _planned_shards(groups: Groups) -> list[tuple[Param, Tensor, int, str | None]]:
    """List (``Param``, shard, number of the group, name in the group) tuples for the parameters in groups."""
    return [
        (owner[1].planned, shard, number, name)
        for number, group in enumerate(groups)
        for name, shard in zip(names_of(group), group["params"], strict=True)
        if (owner := owner_of(shard)) is not None
    ]


def _require_steppable(optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    for argument in signature(optimizer.step).parameters.values():
        if argument.default is not Parameter.empty or argument.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            continue
        raise ValueError(
            f"a step of {kind} needs the argument {argument.name!r}, such as a closure that evaluates the loss, and "
            f"tz.whole has one gradient a step; use an optimizer whose step needs no argument"
        )


def _require_separable(kind: str, result: ProbeResult, state: State, trusted: bool) -> None:
    """Raise unless the optimizer can step a subset of the parameters, and groups without parameters."""
    plan = state.plan
    if result.couples and plan.mesh.shard.size > 1 and not trusted:
        raise RuntimeError(
            f"{kind} couples parameters (beside other probe parameters {result.couples}), and each rank steps only "
            f"some of them; use an optimizer that steps every parameter alone, or model.parameters() without tz.whole "
            f"if torch steps it there"
        )
    if result.fails_empty and result.fails_empty != result.unknown:
        raise ValueError(
            f"{kind} cannot step groups without parameters ({result.fails_empty}), and a rank has such a group if "
            f"others own all of its parameters; use a class that skips them"
        )
    if result.moving_if_any:
        raise ValueError(describe_uneven_option(kind, min(result.moving_if_any)))
    if result.draws and (copies := plan.mesh.replicate.size) > 1 and not trusted:
        raise RuntimeError(
            f"{kind} draws random numbers ({result.draws}), and the {copies} copies of the model would draw "
            f"other ones and drift apart; use an optimizer that draws none, or a mesh of one copy"
        )
    if result.unknown and plan.ranks > 1 and not trusted:
        raise RuntimeError(
            f"{kind} may couple parameters, and cannot be tried on probe parameters ({result.unknown}), and each rank "
            f"steps only some of them; give tz.whole trust_optimizer=True if it steps every parameter alone"
        )


def describe_uneven_option(kind: str, name: str) -> str:
    """Return the error message for an option that a step changes only in groups with parameters or gradients."""
    return (
        f"{kind} changes {name!r} of a group only where it has parameters of the group to step, and ranks step "
        f"different ones, so each would have another value; let its step change it in every group, or keep it in the "
        f"states of parameters"
    )


def members_of(groups: Groups, offset: int, state: State, loads: Sequence[int]) -> list[list[Member]]:
    """Return the parameters of groups, in buckets and with owners. ``offset`` is the number of the first group.

    Frozen parameters follow in buckets of their own, since they may be unfrozen. Parameters in a ``frozen_format`` are
    left out. ``loads`` is the work that each rank already has.
    """
    chosen = [
        (param, shard, offset + number, name)
        for param, shard, number, name in _planned_shards(groups)
        if not param.frozen_format
    ]
    chosen.sort(key=lambda member: not member[1].requires_grad)
    pieces = [
        Piece(
            number,
            work_of_shape(param.shape),
            prod(param.shape) * param.dtype.itemsize,
            (shard.requires_grad, param.dtype),
            param.owner,
        )
        for number, (param, shard, *_) in enumerate(chosen)
    ]
    buckets = assign(pieces, state.plan.mesh.shard.size, state.plan.sizes.bucket_bytes, loads)
    return [[Member(*chosen[number], owner) for number, owner in bucket] for bucket in buckets] or [[]]

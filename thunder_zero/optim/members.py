"""Finds the model and the parameters of ``tz.whole``; makes the optimizer that it stands for.

In: what ``tz.whole`` was given. Out: the model; the ordinary optimizer, made and tried; parameters in buckets, each
with its owner; or a refusal::

    params -> listed -> groups -> model_of      State of the one model that they are of
                               -> ordinary      an optimizer of parameters without memory, and what probe.py found
                               -> members_of    [[Member, Member], [Member]], a list for each bucket

This runs when an optimizer is made and when it gets a group; :func:`ordinary` also in a step, after options or groups
have changed.
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
from thunder_zero.optim.probe import Found, probed
from thunder_zero.optim.stepper import Given, GroupedParams, Groups, Make, blank, copied, made
from thunder_zero.plan.params import Param
from thunder_zero.sharded.sharded_model import owner_of, owner_of_replaced
from thunder_zero.sharded.state import State


def require_maker(make: object) -> None:
    """Refuse what makes no optimizers."""
    if isinstance(make, Optimizer) or not callable(make):
        raise TypeError(
            f"tz.whole was given a {type(make).__name__} to make optimizers with; give the class itself and then the "
            f"parameters, as in tz.whole(torch.optim.Muon, params, lr=1e-3)"
        )


def listed(params: Iterable[Any]) -> Groups:
    """The groups of parameters, named parameters or groups, with lists of parameters."""
    if isinstance(params, nn.Module):
        raise TypeError(f"tz.whole was given a {type(params).__name__}; give it model.parameters(), or some of them")
    return Optimizer(params, {}).param_groups


def model_of(shards: Sequence[Tensor], state: State | None = None) -> State:
    """The model that all of these parameters belong to; ``state`` is the model's, if it is known."""
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


def ordinary(
    make: Make,
    groups: Groups,
    given: Given,
    options: Mapping[str, Any],
    state: State,
    moving: Collection[str] = (),
    *,
    trusted: bool,
) -> tuple[Optimizer, Found]:
    """Make the ordinary optimizer, and try it, on every rank alike: all get the same defaults, and the same errors.

    Args:
        given: of each group the options that the user gave.
        moving: the options of groups that its steps have changed: a new one has its own, if nobody gave them.
        trusted: it steps every parameter alone, whatever is found.

    Returns:
        One over parameters of full shapes, which take no memory; what was found.
    """
    kept = [
        {key: of for key, of in hyper_parameters(group).items() if key in keys or key not in moving}
        for group, keys in zip(groups, given, strict=True)
    ]

    def make_on(of_groups: Groups, members: GroupedParams) -> Optimizer:
        own = [copied(dict(group)) for group in of_groups]  # steps may change tensors in place
        return made(make, copied(dict(options)), own, given, members, named="param_names" in groups[0])

    like = make_on(kept, [(of, name, blank(param, shard)) for param, shard, of, name in _entries(groups)])
    _require_steppable(like)
    found = probed(make_on, like, state.device)
    _require_apart(type(like).__name__, found, state, trusted)
    return like, found


def _entries(groups: Groups) -> list[tuple[Param, Tensor, int, str | None]]:
    """Of each shard in groups its entry in the plan, itself, the number of its group, and its name there."""
    return [
        (owner[1], shard, number, name)
        for number, group in enumerate(groups)
        for name, shard in zip(names_of(group), group["params"], strict=True)
        if (owner := owner_of(shard)) is not None
    ]


def _require_steppable(like: Optimizer) -> None:
    kind = type(like).__name__
    for of in signature(like.step).parameters.values():
        if of.default is not Parameter.empty or of.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            continue
        raise ValueError(
            f"a step of {kind} needs the argument {of.name!r}, such as a closure that evaluates the loss, and tz.whole "
            f"has one gradient a step; use an optimizer whose step needs no argument"
        )


def _require_apart(kind: str, found: Found, state: State, trusted: bool) -> None:
    """Refuse what cannot be stepped in parts. Of most groups, most ranks own no parameter in most buckets."""
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
        raise ValueError(moves_with_parameters_only(kind, min(found.moving_if_any)))
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


def moves_with_parameters_only(kind: str, name: str) -> str:
    """It changes an option only in groups with parameters or gradients, which are on some ranks."""
    return (
        f"{kind} changes {name!r} of a group only where it has parameters of the group to step, and ranks step "
        f"different ones, so each would have another value; let its step change it in every group, or keep it in the "
        f"states of parameters"
    )


def members_of(groups: Groups, offset: int, state: State, loads: Sequence[int]) -> list[list[Member]]:
    """The trained parameters of these groups, from number ``offset`` on, in buckets, with owners; ``loads`` is the work
    that each rank has already."""
    plan = state.plan
    found = [(of, shard, offset + at, name) for of, shard, at, name in _entries(groups) if shard.requires_grad]
    pieces = [
        Piece(number, work_of_shape(param.shape), prod(param.shape) * param.dtype.itemsize, param.dtype)
        for number, (param, *_) in enumerate(found)
    ]
    return [
        [Member(*found[at], owner) for at, owner in zip(bucket.numbers, bucket.owners, strict=True)]
        for bucket in assign(pieces, plan.mesh.shard.size, plan.sizes.bucket_bytes, loads)
    ] or [[]]

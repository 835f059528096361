"""Finds the model and the parameters of ``tz.whole``; makes the optimizer that it stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.runtime.optimizers import hyper_parameters, names_of
from thunder_zero.runtime.registry import owners_of, replaced_path
from thunder_zero.runtime.state import State
from thunder_zero.whole_step.exchange import Member
from thunder_zero.whole_step.owners import Piece, WorkOf, assign
from thunder_zero.whole_step.probe import Found, tried
from thunder_zero.whole_step.sentences import (
    cannot_be_tried,
    copies_draw,
    couples_parameters,
    described_shortly,
    moves_with_parameters_only,
    steps_no_empty_group,
)
from thunder_zero.whole_step.stepper import Given, Groups, Make, Members, blank, copied, made


class _Listed(Optimizer):
    """Lists parameters in groups, as torch does for every optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def require_maker(make: object) -> None:
    """Refuse what makes no optimizers.

    Raises:
        TypeError: an optimizer, parameters or another object in the place of a class.
    """
    if isinstance(make, Optimizer) or not callable(make):
        raise TypeError(
            f"tz.whole was given {described_shortly(make)} to make optimizers with; give the class itself and then the "
            f"parameters, as in tz.whole(torch.optim.Muon, params, lr=1e-3)"
        )


def listed(params: Iterable[Any]) -> Groups:
    """The groups of parameters, named parameters or groups, with lists of parameters.

    Raises:
        TypeError, ValueError: a module; or torch refuses them, such as one parameter in two groups.
    """
    if isinstance(params, nn.Module):
        raise TypeError(f"tz.whole was given a {type(params).__name__}; give it model.parameters(), or some of them")
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


@dataclass(frozen=True, eq=False)
class Ordinary:
    """What is known of the optimizer that each rank steps on a part of the parameters.

    Attributes:
        like: one over parameters of full shapes, which take no memory.
        moving: the options of groups that its own steps change.
        moves_all: it moves parameters without a gradient, too.
    """

    like: Optimizer
    moving: frozenset[str]
    moves_all: bool


def ordinary(
    make: Make,
    groups: Groups,
    given: Given,
    options: Mapping[str, Any],
    state: State,
    moving: Collection[str] = (),
) -> Ordinary:
    """Make the ordinary optimizer, and try it, on every rank alike: all get the same defaults, and the same errors.

    Args:
        make: makes it.
        groups: of shards.
        given: of each group the options that the user gave.
        options: of ``make``.
        state: the model's.
        moving: the options of groups that its steps have changed: a new one has its own, if nobody gave them.

    Raises:
        TypeError: not an optimizer.
        ValueError: its step needs arguments, or fails on groups without parameters; it makes other groups, or changes
            options only where a group has parameters.
        RuntimeError: it couples parameters, cannot be tried, or draws random numbers where there are several copies.
        Exception: raised by ``make``.
    """
    kept = [
        {key: of for key, of in hyper_parameters(group).items() if key in keys or key not in moving}
        for group, keys in zip(groups, given, strict=True)
    ]

    def make_on(of_groups: Groups, members: Members) -> Optimizer:
        own = [copied(dict(group)) for group in of_groups]  # steps may change tensors in place
        return made(make, copied(dict(options)), own, given, members, named="param_names" in groups[0])

    like = make_on(kept, _blanks(groups))
    _require_steppable(like)
    found = tried(make_on, like, state.device)
    _require_apart(type(like).__name__, found, state)
    return Ordinary(like, found.moving, found.moves_all)


def _blanks(groups: Groups) -> Members:
    """Parameters like the shards in groups, of full shapes."""
    found = []
    for number, group in enumerate(groups):
        shards = group["params"]
        for name, shard, owner in zip(names_of(group), shards, owners_of(shards), strict=True):
            assert owner is not None, "a parameter of the model"
            found.append((number, name, blank(owner[1], shard)))
    return found


def _require_steppable(like: Optimizer) -> None:
    kind = type(like).__name__
    for of in signature(like.step).parameters.values():
        if of.default is not Parameter.empty or of.kind is not Parameter.POSITIONAL_OR_KEYWORD:
            continue
        if of.name == "closure":
            raise ValueError(
                f"{kind} evaluates the loss several times in a step, by a closure, and tz.whole has one gradient a "
                f"step; use an optimizer whose step needs no closure"
            )
        raise ValueError(
            f"a step of {kind} needs the argument {of.name!r}, and tz.whole has none to give; use an optimizer whose "
            f"step needs no argument"
        )


def _require_apart(kind: str, found: Found, state: State) -> None:
    """Refuse what cannot be stepped in parts. Of most groups, most ranks own no parameter in most buckets."""
    plan = state.plan
    trusted = plan.policy.trust_optimizer
    if found.couples and plan.world_size > 1 and not trusted:
        raise RuntimeError(couples_parameters(kind, found.couples))
    if found.fails_empty and found.fails_empty != found.unknown:
        raise ValueError(steps_no_empty_group(kind, found.fails_empty))
    if found.moving_if_any:
        raise ValueError(moves_with_parameters_only(kind, min(found.moving_if_any)))
    if found.draws and plan.replicas > 1 and not trusted:
        raise RuntimeError(copies_draw(kind, found.draws, plan.replicas))
    if found.unknown and plan.ranks > 1 and not trusted:
        raise RuntimeError(cannot_be_tried(kind, found.unknown))


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

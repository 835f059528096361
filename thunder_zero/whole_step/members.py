"""Finds the model and the parameters of ``tz.whole``; makes the optimizer that it stands for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_zero.runtime.couplings import moves_parameters_without_gradients, refuse_coupled_parameters
from thunder_zero.runtime.gradients_to_try import STEPS
from thunder_zero.runtime.optimizers import hyper_parameters
from thunder_zero.runtime.probe import undisturbed
from thunder_zero.runtime.registry import owners_of, replaced_path
from thunder_zero.runtime.stand_ins import in_words
from thunder_zero.runtime.state import State
from thunder_zero.runtime.trial import changed_options, needed_by_step
from thunder_zero.whole_step.exchange import Member
from thunder_zero.whole_step.owners import Piece, WorkOf, assign
from thunder_zero.whole_step.sentences import described_shortly, moves_with_parameters_only, steps_no_empty_group
from thunder_zero.whole_step.stepper import Given, Groups, Make, Stepper, blank, copied, only, parameters_in


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


def ordinary(make: Make, groups: Groups, given: Given, options: Mapping[str, Any], state: State) -> Ordinary:
    """Make the ordinary optimizer, and try it, on every rank alike: all get the same defaults, and the same errors.

    Args:
        make: makes it.
        groups: of shards.
        given: of each group the options that the user gave.
        options: of ``make``.
        state: the model's.

    Raises:
        TypeError: not an optimizer.
        ValueError: its step needs arguments, or fails on groups without parameters; it makes other groups, or changes
            options only where a group has parameters.
        RuntimeError: it couples parameters, or cannot be probed.
        Exception: raised by ``make``.
    """
    like = _like(make, groups, given, options)
    _require_steppable(like)
    trusted = state.plan.ranks == 1 or state.plan.policy.trust_optimizer
    moving = (
        frozenset[str]()
        if trusted
        else refuse_coupled_parameters(like, state.device, state.plan.world_size, state.plan.replicas)
    )
    _require_steps_empty_groups(make, like, given, options, state, moving)
    return Ordinary(like, moving, moves_parameters_without_gradients(like, state.device))


def _like(make: Make, groups: Groups, given: Given, options: Mapping[str, Any]) -> Optimizer:
    shards = [shard for group in groups for shard in group["params"]]
    owners = [owner for owner in owners_of(shards) if owner is not None]
    blanks = {id(shard): blank(param, shard) for shard, (_, param) in zip(shards, owners, strict=True)}
    of_blanks = [{**group, "params": [blanks[id(shard)] for shard in group["params"]]} for group in groups]
    made_of = [{**parameters_in(group), **only(group, keys)} for group, keys in zip(of_blanks, given, strict=True)]
    made = make(made_of, **options)
    if not isinstance(made, Optimizer):
        raise TypeError(
            f"tz.whole was given {described_shortly(make)}, which makes a {type(made).__name__}; give a class of "
            f"torch.optim.Optimizer"
        )
    if len(made.param_groups) != len(groups):
        raise ValueError(
            f"{type(made).__name__} makes {len(made.param_groups)} groups of the {len(groups)} that it was given, so "
            f"tz.whole cannot tell their parameters apart; give tz.whole each of its groups, or each of the optimizers "
            f"that it combines"
        )
    for own, group, keys in zip(made.param_groups, groups, given, strict=True):
        own.update({key: value for key, value in hyper_parameters(group).items() if key not in keys})
    return made


def _require_steppable(like: Optimizer) -> None:
    kind = type(like).__name__
    for name in needed_by_step(like):
        if name == "closure":
            raise ValueError(
                f"{kind} evaluates the loss several times in a step, by a closure, and tz.whole has one gradient a "
                f"step; use an optimizer whose step needs no closure"
            )
        raise ValueError(
            f"a step of {kind} needs the argument {name!r}, and tz.whole has none to give; use an optimizer whose step "
            f"needs no argument"
        )


def _require_steps_empty_groups(
    make: Make, like: Optimizer, given: Given, options: Mapping[str, Any], state: State, moving: Collection[str]
) -> None:
    """Of most groups, most ranks own no parameter in most buckets."""
    kind, groups = type(like).__name__, [copied(hyper_parameters(group)) for group in like.param_groups]
    stepper = Stepper(make, options, [], named="param_names" in like.param_groups[0])
    before, after = list(map(in_words, groups)), groups
    try:
        with undisturbed(state.device):
            for _ in range(STEPS):  # as many as the probe took
                _, after = stepper.step({}, after, given, {})
    except Exception as error:
        raise ValueError(steps_no_empty_group(kind, error)) from error
    if still := sorted(set(moving) - changed_options(before, list(map(in_words, after)))):
        raise ValueError(moves_with_parameters_only(kind, still[0]))


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

"""What an optimizer of whole parameters says: who owns what, and why something cannot be done."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.optim import Optimizer

from thunder_zero.whole_step.exchange import Member
from thunder_zero.whole_step.owners import WorkOf


def shares(members: Sequence[Member], work_of: WorkOf, ranks: int) -> list[str]:
    """A line for each rank: its share of the work, and the parameters that it owns."""
    works = [work_of(member.param.shape) for member in members]
    lines = []
    for rank in range(ranks):
        mine = [(of, work) for of, work in zip(members, works, strict=True) if of.owner == rank]
        share = sum(work for _, work in mine) / max(sum(works), 1)
        lines.append(
            f"    rank {rank} owns {share:.0%} of the work: {', '.join(of.param.path for of, _ in mine) or 'nothing'}"
        )
    return lines


def no_attribute(name: str, kind: str, foreign: Collection[str]) -> str:
    """There is no attribute of this name; ``foreign`` are those that the ordinary optimizer has."""
    if name not in foreign:
        return f"tz.whole has no attribute {name!r}; use those of torch.optim.Optimizer"
    return (
        f"tz.whole({kind}) has no {name!r}, which {kind} has: it has what torch.optim.Optimizer has, as each rank "
        f"steps {kind} on a part of the parameters; put {kind} on model.parameters() itself if it steps each row alone"
    )


def not_set(name: str, kind: str) -> str:
    """An attribute of the ordinary optimizer is not set from outside."""
    return (
        f"tz.whole({kind}) cannot set {name!r}, which {kind} has: each rank steps {kind} on a part of the parameters, "
        f"and would not see it; give tz.whole a function that makes {kind} and sets it"
    )


def later_group(kind: str, counts: Sequence[str]) -> str:
    """No group may be added after a step that has changed these attributes."""
    return (
        f"steps of {kind} change its {', '.join(map(repr, counts))}, which begins anew for parameters that are added "
        f"after a step; give tz.whole all groups before the first step, or make another optimizer of the new ones"
    )


def makes_no_optimizer(make: object, made: object) -> str:
    """What was given makes something else."""
    return (
        f"tz.whole was given {described_shortly(make)}, which makes a {type(made).__name__}; give a class of "
        f"torch.optim.Optimizer"
    )


def makes_own_groups(kind: str, made: int, given: int) -> str:
    """It does not keep to the groups that it is given."""
    return (
        f"{kind} makes {made} groups of the {given} that it was given, so tz.whole cannot tell their parameters apart; "
        f"give tz.whole each of its groups, or each of the optimizers that it combines"
    )


def described_shortly(value: object) -> str:
    """What a user gave where a class belongs."""
    return f"a {type(value).__name__}" if isinstance(value, Optimizer | list | dict) else f"{value!r}"[:80]


def moves_with_parameters_only(kind: str, name: str) -> str:
    """It changes an option only in groups with parameters or gradients, which are on some ranks."""
    return (
        f"{kind} changes {name!r} of a group only where it has parameters of the group to step, and ranks step "
        f"different ones, so each would have another value; let its step change it in every group, or keep it in the "
        f"states of parameters"
    )


def steps_no_empty_group(kind: str, error: str) -> str:
    """It fails on groups without parameters."""
    return (
        f"{kind} cannot step groups without parameters ({error}), and a rank has such a group if others own all of its "
        f"parameters; use a class that skips them"
    )


def couples_parameters(kind: str, evidence: str) -> str:
    """Its step of a parameter is another one beside others."""
    return (
        f"{kind} couples parameters (beside other stand-ins {evidence}), and each rank steps only some of them; use an "
        f"optimizer that steps every parameter alone, or model.parameters() without tz.whole if torch steps it there"
    )


def copies_draw(kind: str, evidence: str, copies: int) -> str:
    """It draws random numbers, and a parameter has several owners."""
    return (
        f"{kind} draws random numbers ({evidence}), and the {copies} copies of the model would draw other ones and "
        f"drift apart; use an optimizer that draws none, or a mesh of one copy"
    )


def cannot_be_tried(kind: str, why: str) -> str:
    """It may couple parameters."""
    return (
        f"{kind} may couple parameters, and cannot be tried on stand-ins ({why}), and each rank steps only some of "
        f"them; give the transform trust_optimizer=True if it steps every parameter alone"
    )


def not_copied(kind: str) -> str:
    """It is not copied, nor pickled."""
    return (
        f"tz.whole({kind}) cannot be copied or pickled, as it belongs to a model; save it with tz.save, or its "
        f"state_dict()"
    )


def changed_by_hand(kind: str) -> str:
    """Its groups have other parameters than it was given."""
    return (
        f"the parameters in the groups of tz.whole({kind}) were changed by hand; use add_param_group, or make a new "
        f"optimizer of other parameters"
    )

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


def steps_no_empty_group(kind: str, error: Exception) -> str:
    """It fails on groups without parameters."""
    return (
        f"{kind} cannot step groups without parameters ({type(error).__name__}: {' '.join(str(error).split())[:120]}), "
        f"and a rank has such a group if others own all of its parameters; use a class that skips them"
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

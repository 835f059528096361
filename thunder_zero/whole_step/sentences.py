"""What an optimizer of whole parameters says: who owns what, and why something cannot be done."""

from __future__ import annotations

from collections.abc import Sequence

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


def no_attribute(name: str, like: type[Optimizer]) -> str:
    """There is no attribute of this name; ``like`` is the class of the ordinary optimizer."""
    if name not in dir(like):
        return f"tz.whole has no attribute {name!r}; use those of torch.optim.Optimizer"
    return (
        f"tz.whole({like.__name__}) has no {name!r}, which {like.__name__} has: it has what torch.optim.Optimizer has, "
        f"as each rank steps {like.__name__} on a part of the parameters; put {like.__name__} on model.parameters() "
        f"itself if it steps each row alone"
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

"""Lists one rank's part of a model and its optimizers by state-dict names.

The names are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}`` with
the plain module's parameter names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thunder_zero import layout
from thunder_zero.comm.agree import Fact
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime.optimizers import StepsWhole, class_name, state_is_rows
from thunder_zero.runtime.sharded_model import ShardedModel

MODEL = "model"
OPTIM = "optim"
STATE = "state"
GROUPS = "param_groups"
EXTRA = "extra"
EMAS = "ema"  # averages of parameters, by the name of their extra
EXTRA_STATE = "_extra_state"  # the end of the name of a module's extra state; other values that hooks add are not saved
OPTIMIZER_CLASS = "optimizer_class"  # the names of the optimizers' classes, by number
RANK_KEY = re.compile(r"rank(\d{1,6})\.(.*)", re.DOTALL)
Optimizers = Optimizer | Iterable[Optimizer]


@dataclass(frozen=True, slots=True)
class ModelContents:
    """One rank's part of a model.

    Attributes:
        plan: the parameters, and how the ranks of one copy of the model share them.
        shards: the tensors that the optimizer steps, by path.
        ignored: parameters that the policy ignores, so that each rank has its own, by name.
        buffers: the buffers of the state dict, by name; rank 0's are saved.
        states: the modules' extra states (``get_extra_state``), by name; rank 0's are saved.
        rank: this rank's number among all ranks.
        writes: whether this rank's copy of the model is the one that is written (hybrid sharding has several).
        state_dict: the plain module's state dict: all names in their order, with the values that hooks add.
    """

    plan: Plan
    shards: Mapping[str, Tensor]
    ignored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, Any]
    rank: int
    writes: bool = True
    state_dict: Mapping[str, Any] = field(default_factory=dict)

    def writes_whole(self, number: int) -> bool:
        """Whether this rank writes the replicated parameter of this number: ranks take turns."""
        return self.writes and number % self.plan.world_size == self.plan.rank

    @property
    def rank_prefix(self) -> str:
        """The first part of the keys of values that belong to this rank alone."""
        return f"rank{self.rank}"


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that an optimizer steps.

    Attributes:
        name: its first name in the model's state dict.
        number: its place in the plan; 0 if it is ignored.
        param: its entry in the plan; None if it is ignored.
        tensor: the shard, or the ignored parameter.
        owner: the rank of its copy of the model that alone has its states, and in full (``tz.whole``); None if each
            rank has its rows of them, or all.
    """

    name: str
    number: int
    param: Param | None
    tensor: Tensor
    owner: int | None = None


def contents_of(model: ShardedModel) -> ModelContents:
    """List this rank's part of a model.

    The names are the plan's, except inside wrappers that take their own name out of the state dict (torch's
    checkpoint_wrapper).
    """
    state, plain = model.state, model.plain
    plan, ranks = state.plan, state.ranks
    found = plain.state_dict(keep_vars=True)
    tensors = chain(plain.named_parameters(remove_duplicate=False), plain.named_buffers(remove_duplicate=False))
    of_tensor = {id(tensor): path for path, tensor in tensors}
    paths = {name: of_tensor[id(tensor)] for name, tensor in found.items() if id(tensor) in of_tensor}
    names: dict[Param, list[str]] = {}
    for name, path in paths.items():
        if path in plan.by_name:
            names.setdefault(plan.by_name[path], []).append(name)
    params = {param: replace(param, path=of[0], aliases=tuple(of[1:])) for param, of in names.items()}
    at_rest, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    return ModelContents(
        plan=replace(plan, params=tuple(params.values())),
        shards={param.path: state.shards[of_plan.path] for of_plan, param in params.items()},
        ignored={name: at_rest[path] for name, path in paths.items() if path in at_rest and path not in plan.by_name},
        buffers={name: buffers[path] for name, path in paths.items() if path not in at_rest},
        states={name: value for name, value in found.items() if name.rpartition(".")[2] == EXTRA_STATE},
        rank=ranks.everyone.rank(),
        writes=ranks.across is None or ranks.across.rank() == 0,
        state_dict=found,
    )


def optimizer_list(optimizers: Optimizers | None) -> list[Optimizer]:
    """One optimizer, several or None, as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def split_rank_prefix(key: str) -> tuple[int, str] | None:
    """The rank that a key's value belongs to, and the rest of the key; None if the ranks share the value."""
    found = RANK_KEY.fullmatch(key)
    return None if found is None else (int(found[1]), found[2])


def rows_of(contents: ModelContents, param: Param) -> tuple[int, int]:
    """The rows of a parameter, and of its states, that this rank has, as (start, stop); all rows, if replicated."""
    if not param.sharded:
        return 0, param.shape[0] if param.shape else 1
    return layout.row_range(param.shape[0], contents.plan.world_size, contents.plan.rank)


def named_groups(contents: ModelContents, optimizer: Optimizer) -> list[list[Named]]:
    """The parameters of each group of an optimizer.

    Raises:
        ValueError: a parameter that is not the model's.
    """
    known: dict[int, tuple[str, int, Param | None]] = {
        **{id(tensor): (name, 0, None) for name, tensor in contents.ignored.items()},
        **{id(contents.shards[param.path]): (param.path, at, param) for at, param in enumerate(contents.plan.params)},
    }
    found = []
    for group in optimizer.param_groups:
        members = []
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ValueError(
                    f"{class_name(optimizer)} has a parameter of shape {tuple(tensor.shape)} that is not one of "
                    f"this model's; build the optimizer on model.parameters()"
                )
            owner = optimizer.owner_of(tensor) if isinstance(optimizer, StepsWhole) else None
            members.append(Named(*known[id(tensor)], tensor, owner))
        found.append(members)
    return found


def all_named_groups(contents: ModelContents, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
    """The parameters of each group of all optimizers, in one list.

    Raises:
        ValueError: a parameter that is not the model's, or is in two optimizers; a state of no parameter.
    """
    groups = [group for optimizer in optimizers for group in named_groups(contents, optimizer)]
    counts = Counter(named.name for group in groups for named in group)
    for name, count in counts.items():
        if count > 1:
            raise ValueError(f"parameter {name!r} is in {count} optimizers; give each parameter to one of them")
    stepped = {id(named.tensor) for group in groups for named in group}
    for optimizer in optimizers:
        for key in optimizer.state:
            if id(key) not in stepped:
                what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
                raise ValueError(
                    f"{class_name(optimizer)} has a state for {what}, which is not one of its parameters, so the "
                    f"state has no name to be saved under; remove it from optimizer.state and save it as an extra"
                )
    return groups


def named_states(contents: ModelContents, optimizers: Iterable[Optimizer]) -> list[tuple[Named, Mapping[str, Any]]]:
    """The parameters of all optimizers in the order of their groups, each with its states by name."""
    return [
        (named, optimizer.state.get(named.tensor, {}))
        for optimizer in optimizers
        for named in chain(*named_groups(contents, optimizer))
    ]


def state_facts(contents: ModelContents, optimizers: Sequence[Optimizer]) -> list[Fact]:
    """The states of each parameter that ranks share, for the ranks to compare: a state that is missing on one of them
    cannot be gathered or saved."""
    facts = []
    for named, values in named_states(contents, optimizers):
        what = f"the optimizer's state of parameter {named.name!r}"
        if named.owner is not None:
            facts.append(Fact(what, f"whole, on rank {named.owner}", "build the same optimizer on every rank"))
        elif named.param is not None:
            rows = {key for key, value in values.items() if state_is_rows(str(key), value, named.param, contents.plan)}
            shown = ", ".join(f"{key} by rows" if key in rows else str(key) for key in values)
            facts.append(Fact(what, shown or "none", "step the optimizer on every rank"))
    return facts


def group_facts(contents: ModelContents, optimizers: Iterable[Optimizer]) -> list[Fact]:
    """The groups of the optimizers, then their parameters, for the ranks to compare."""
    remedy = "build the same optimizers, with the same groups, on every rank"
    facts = []
    for number, optimizer in enumerate(optimizers):
        for at, members in enumerate(named_groups(contents, optimizer)):
            where, names = f"group {at} of optimizer {number}", [named.name for named in members]
            facts.append(Fact(where, listed(names), remedy))
            facts += [Fact(f"parameter {place} of {where}", repr(name), remedy) for place, name in enumerate(names)]
    return facts


def listed(names: Sequence[str]) -> str:
    """The first three of these names and the number of the others, or "none", for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) + more) or "none"


def numbered_state_dict(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Named]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One optimizer's state dict with its parameters by number, as ``Optimizer.load_state_dict`` takes it.

    Args:
        saved: the groups' saved values.
        groups: the parameters of each group.
        states: the saved states by parameter name.
    """
    names = [named.name for group in groups for named in group]
    at = {name: number for number, name in enumerate(names)}
    numbered = [
        {**group, "params": [at[named.name] for named in members]} for group, members in zip(saved, groups, strict=True)
    ]
    return {STATE: {at[name]: dict(states[name]) for name in names if name in states}, GROUPS: numbered}


def groups_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, from hyper-parameters by ``"<group>.<name>"``.

    Raises:
        ValueError: a key that is not of this form; parameters that are not a list of names.
    """
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        number, _, name = key.partition(".")
        if not number.isdecimal() or (name == "params" and not is_names(value)):
            raise ValueError(
                f"the optimizer's parameter groups are damaged: {key!r} is {value!r}; use another checkpoint"
            )
        groups.setdefault(int(number), {})[name] = value
    return [groups[number] for number in sorted(groups)]


def is_names(value: object) -> bool:
    """Whether a value is a list of names."""
    return isinstance(value, list) and all(isinstance(name, str) for name in value)

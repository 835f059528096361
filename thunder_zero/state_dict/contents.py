"""What one rank holds of a model and its optimizers, under the names of state dicts.

The names are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}`` with
the plain module's parameter names. State dicts and checkpoints are made of these.
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
from thunder_zero.runtime.sharded_model import ShardedModel
from thunder_zero.runtime.shards import state_is_rows

MODEL = "model"
OPTIM = "optim"
STATE = "state"
GROUPS = "param_groups"
EXTRA = "extra"
EXTRA_STATE = "_extra_state"  # the end of such a name in a state dict; what else hooks add there is not saved
OPTIMIZER_CLASS = "optimizer_class"  # names of classes, by the number of the optimizer
RANK_KEY = re.compile(r"rank(\d+)\.(.*)", re.DOTALL)
Optimizers = Optimizer | Iterable[Optimizer] | None


@dataclass(frozen=True, slots=True)
class ModelContents:
    """What one rank holds of a model.

    Attributes:
        plan: what each parameter is, among the ranks of one copy.
        shards: what the optimizer sees, by path.
        ignored: parameters that are each rank's own, by name.
        buffers: those of the state dict, by name; rank 0's are saved.
        states: what modules add to a state dict themselves (``get_extra_state``), by name; rank 0's are saved.
        rank: which of all ranks this is.
        writes: whether this is the copy of the model that is written (hybrid sharding has several).
        plain: the plain module's state dict: all names in their order, and what hooks add to it.
    """

    plan: Plan
    shards: Mapping[str, Tensor]
    ignored: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, Any]
    rank: int
    writes: bool = True
    plain: Mapping[str, Any] = field(default_factory=dict)

    def writes_whole(self, number: int) -> bool:
        """Whether this rank writes the parameter of this number, which all ranks have in full: they take turns."""
        return self.writes and number % self.plan.world_size == self.plan.rank

    @property
    def rank_prefix(self) -> str:
        """The first part of keys of what this rank alone has."""
        return f"rank{self.rank}"


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that an optimizer steps: its name, its number among all, and what it is, unless it is ignored."""

    name: str
    number: int
    param: Param | None
    tensor: Tensor


def contents_of(model: ShardedModel) -> ModelContents:
    """What this rank holds of a model, by the names of its state dict. They are the plan's, but for what stands in a
    wrapper that takes its own name out of the state dict (torch's checkpoint_wrapper)."""
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
        plain=found,
    )


def optimizer_list(optimizers: Optimizers) -> list[Optimizer]:
    """One, several or none, as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def split_rank_prefix(key: str) -> tuple[int, str] | None:
    """The rank that alone has what is under this key, and the rest of the key; None if the ranks share it."""
    found = RANK_KEY.fullmatch(key)
    return None if found is None else (int(found[1]), found[2])


def rows_of(held: ModelContents, param: Param) -> tuple[int, int]:
    """Which rows of a parameter, or of its state, are here: all of them, if it is replicated."""
    if not param.sharded:
        return 0, param.shape[0] if param.shape else 1
    return layout.row_range(param.shape[0], held.plan.world_size, held.plan.rank)


def named_groups(held: ModelContents, optimizer: Optimizer) -> list[list[Named]]:
    """The parameters of each group of an optimizer.

    Raises:
        ValueError: one that is none of the model's.
    """
    known: dict[int, tuple[str, int, Param | None]] = {
        **{id(tensor): (name, 0, None) for name, tensor in held.ignored.items()},
        **{id(held.shards[param.path]): (param.path, at, param) for at, param in enumerate(held.plan.params)},
    }
    found = []
    for group in optimizer.param_groups:
        members = []
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} steps a parameter of shape {tuple(tensor.shape)} that is none of the "
                    f"model's; give the optimizer that was built on model.parameters()"
                )
            members.append(Named(*known[id(tensor)], tensor))
        found.append(members)
    return found


def all_named_groups(held: ModelContents, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
    """The parameters of each group of all optimizers, one after the other.

    Raises:
        ValueError: one that is none of the model's; one of two optimizers; a state of none of them.
    """
    groups = [group for optimizer in optimizers for group in named_groups(held, optimizer)]
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
                    f"{type(optimizer).__name__} keeps a state for {what}, which is none of the parameters that it "
                    f"steps, so a checkpoint has no place for it; take it out of optimizer.state, save it as an extra"
                )
    return groups


def named_states(held: ModelContents, optimizers: Iterable[Optimizer]) -> list[tuple[Named, Mapping[str, Any]]]:
    """What optimizers step, one group after the other, each with its states by name."""
    return [
        (named, optimizer.state.get(named.tensor, {}))
        for optimizer in optimizers
        for named in chain(*named_groups(held, optimizer))
    ]


def state_facts(held: ModelContents, optimizers: Sequence[Optimizer]) -> list[Fact]:
    """Which states there are of each parameter that ranks share, for them to compare: what one of them lacks, nobody
    can put together."""
    lines = []
    for named, values in named_states(held, optimizers):
        if named.param is not None:
            rows = {key for key, value in values.items() if state_is_rows(str(key), value, named.param, held.plan)}
            shown = ", ".join(f"{key} by rows" if key in rows else str(key) for key in values)
            what = f"the optimizer's state of parameter {named.name!r}"
            lines.append(Fact(what, shown or "nothing", "step the optimizer on every rank alike"))
    return lines


def numbered_state_dict(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Named]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """One optimizer's state dict, with its parameters by number: its groups as saved, and their states by name."""
    names = [named.name for group in groups for named in group]
    at = {name: number for number, name in enumerate(names)}
    numbered = [
        {**group, "params": [at[named.name] for named in members]} for group, members in zip(saved, groups, strict=True)
    ]
    return {STATE: {at[name]: dict(states[name]) for name in names if name in states}, GROUPS: numbered}


def groups_of(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An optimizer's parameter groups, of hyper-parameters by ``"<group>.<name>"``."""
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        number, _, name = key.partition(".")
        groups.setdefault(int(number), {})[name] = value
    return [groups[number] for number in sorted(groups)]

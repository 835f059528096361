"""Lists what one rank has of a model and its optimizers, by the names of a checkpoint.

They are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``, with the
plain module's names. Each rank's own values (extras, ignored parameters and their states) are under ``"rank<number>"``.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from thunder_zero.checkpoint.dcp_write import Entries, KeyPath
from thunder_zero.comm.agree import Fact
from thunder_zero.runtime.optimizers import StepsWhole, class_name
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
Values = dict[KeyPath, Tensor | bytes]


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has of a model.

    Attributes:
        params: the parameters by name, a tied one under its first: DTensors, or full tensors (stage 0).
        aliases: the other names of tied parameters, with their first.
        ignored: parameters that the policy ignores, so that each rank has its own, by name.
        paths: in the plain module, by name; torch's wrappers take their own names out of state dicts.
        buffers: the buffers of the state dict, by name; rank 0's are saved.
        states: the modules' extra states (``get_extra_state``), by name; rank 0's are saved.
        rank: this rank's number among all ranks.
        ranks: how many they are.
        in_copy: its number among the ranks that share a copy of the model, and how many they are.
        writes: whether its copy is the one that is written (hybrid sharding has several).
    """

    params: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    ignored: Mapping[str, Tensor]
    paths: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, Any]
    rank: int
    ranks: int
    in_copy: tuple[int, int]
    writes: bool = True

    @property
    def rank_prefix(self) -> str:
        """The first part of the keys of values that belong to this rank alone."""
        return f"rank{self.rank}"

    def is_mine(self, number: int, value: object) -> bool:
        """Whether this rank writes its part of a value of the parameter of this number: ranks take turns with what all
        of them have."""
        at, size = self.in_copy
        return self.writes and (is_cut(value) or number % size == at)


@dataclass(frozen=True, slots=True)
class Named:
    """A parameter that an optimizer steps.

    Attributes:
        name: its first name in the model's state dict.
        tensor: the parameter.
        number: its place among the model's parameters; None if it is ignored: each rank has its own.
        states: its states by name, as far as this rank has them.
        owner: the rank of its copy of the model that alone has its states, and in full (``tz.whole``); None if each
            rank has its part of them.
    """

    name: str
    tensor: Tensor
    number: int | None
    states: Mapping[str, Any]
    owner: int | None


def contents_of(model: ShardedModel) -> Contents:
    """List what this rank has of a model; of parameters the shards, also inside of ``full_parameters``."""
    state, plain = model.state, model.plain
    of_tensor = {id(tensor): path for path, tensor in chain(plain.named_parameters(), plain.named_buffers())}
    found = plain.state_dict(keep_vars=True)
    paths = {name: of_tensor[id(value)] for name, value in found.items() if id(value) in of_tensor}
    planned = {name: state.plan.by_name[path].path for name, path in paths.items() if path in state.plan.by_name}
    first = dict[str, str]()
    for name, path in planned.items():
        first.setdefault(path, name)
    others, ranks = {name: found[name] for name in paths if name not in planned}, state.ranks
    return Contents(
        params={name: state.shards[path] for path, name in first.items()},
        aliases={name: first[path] for name, path in planned.items() if first[path] != name},
        ignored={name: value for name, value in others.items() if isinstance(value, nn.Parameter)},
        paths=paths,
        buffers={name: value for name, value in others.items() if not isinstance(value, nn.Parameter)},
        states={name: value for name, value in found.items() if name.rpartition(".")[2] == EXTRA_STATE},
        rank=ranks.everyone.rank(),
        ranks=ranks.everyone.size(),
        in_copy=(ranks.inside.rank(), ranks.inside.size()),
        writes=ranks.across is None or ranks.across.rank() == 0,
    )


def optimizer_list(optimizers: Optimizers | None) -> list[Optimizer]:
    """One optimizer, several or None, as a list."""
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def is_cut(value: object) -> bool:
    """Whether each rank has a part of a value."""
    return isinstance(value, DTensor) and any(isinstance(placement, Shard) for placement in value.placements)


def split_rank_prefix(key: str) -> tuple[int, str] | None:
    """The rank that a key's value belongs to, and the rest of the key; None if the ranks share the value."""
    found = RANK_KEY.fullmatch(key)
    return None if found is None else (int(found[1]), found[2])


def listed(names: Sequence[str]) -> str:
    """The first three of these names and the number of the others, or "none", for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) + more) or "none"


def pickle_value(value: Any) -> bytes:
    """A value as ``torch.save`` writes it.

    Raises:
        ValueError: ``torch.load(weights_only=True)`` does not read it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"torch.load(weights_only=True) cannot read an object of type {type(value).__name__}; pass numbers, "
            f"strings, tensors, or dicts and lists of them"
        ) from error
    return stream.getvalue()


def model_entries(contents: Contents, root: KeyPath = (MODEL,)) -> Entries:
    """What this rank writes of its model, under a path."""
    values: Values = {}
    for number, (name, param) in enumerate(contents.params.items()):
        if contents.is_mine(number, param):
            values[*root, name] = param.detach()
    values |= {(contents.rank_prefix, *root, name): tensor.detach() for name, tensor in contents.ignored.items()}
    if contents.rank == 0:
        values |= {(*root, name): tensor.detach() for name, tensor in contents.buffers.items()}
        values |= {(*root, name): pickle_value(value) for name, value in contents.states.items()}
    return Entries(values, {(*root, alias): (*root, name) for alias, name in contents.aliases.items()})


def named_groups(contents: Contents, optimizer: Optimizer) -> list[list[Named]]:
    """The parameters of each group of an optimizer.

    Raises:
        ValueError: a parameter that is not the model's.
    """
    known: dict[int, tuple[str, int | None]] = {id(tensor): (name, None) for name, tensor in contents.ignored.items()}
    known |= {id(tensor): (name, number) for number, (name, tensor) in enumerate(contents.params.items())}
    found = []
    for group in optimizer.param_groups:
        members = []
        for tensor in group["params"]:
            if id(tensor) not in known:
                raise ValueError(
                    f"{class_name(optimizer)} has a parameter of shape {tuple(tensor.shape)} that is not one of "
                    f"this model's; build the optimizer on model.parameters()"
                )
            name, number = known[id(tensor)]
            owner = optimizer.owner_of(tensor) if isinstance(optimizer, StepsWhole) else None
            members.append(Named(name, tensor, number, optimizer.state.get(tensor, {}), owner))
        found.append(members)
    return found


def all_named_groups(contents: Contents, optimizers: Sequence[Optimizer]) -> list[list[Named]]:
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


def optimizer_entries(
    contents: Contents, optimizers: Sequence[Optimizer], groups: Sequence[Sequence[Named]]
) -> Entries:
    """What this rank writes of the optimizers, whose groups are numbered consecutively.

    Raises:
        ValueError: a state has a dot in its name, or is neither a part nor one value; a hyper-parameter cannot be
            saved.
    """
    values: Values = {}
    for named in chain(*groups):
        for key, value in named.states.items():
            values |= _state_values(contents, named, key, value)
    if contents.rank == 0:
        saved = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, (group, members) in enumerate(zip(saved, groups, strict=True)):
            for key, value in {**group, "params": [named.name for named in members]}.items():
                what = f"hyper-parameter {key!r} of parameter group {number}"
                values[OPTIM, GROUPS, number, key] = _written(what, value)
        for number, optimizer in enumerate(optimizers):
            values[OPTIMIZER_CLASS, number] = pickle_value(class_name(optimizer))
    return Entries(values, {})


def state_facts(groups: Iterable[Iterable[Named]]) -> list[Fact]:
    """The states of each parameter that ranks share, for the ranks to compare: one that a rank lacks is not saved."""
    facts = []
    for named in chain(*groups):
        what = f"the optimizer's state of parameter {named.name!r}"
        if named.owner is not None:
            facts.append(Fact(what, f"whole, on rank {named.owner}", "build the same optimizer on every rank"))
        elif named.number is not None:
            shown = ", ".join(f"{key} by rows" if is_cut(value) else str(key) for key, value in named.states.items())
            facts.append(Fact(what, shown or "none", "step the optimizer on every rank"))
    return facts


def _state_values(contents: Contents, named: Named, key: str, value: Any) -> Values:
    what = f"the optimizer's state {key!r} of parameter {named.name!r}"
    if not isinstance(key, str) or "." in key:
        raise ValueError(f"cannot save {what}: the name of a state must be a string without dots; rename it")
    path: KeyPath = (OPTIM, STATE, named.name, key)
    if named.owner is not None:
        mine = contents.writes and named.owner == contents.in_copy[0]
        return {path: _written(what, value)} if mine else {}
    if not isinstance(value, Tensor | bool | int | float | str | None):
        raise ValueError(
            f"cannot save {what}: values of type {type(value).__name__} cannot be merged across ranks; save it as an "
            f"extra"
        )
    if named.number is None:
        return {(contents.rank_prefix, *path): _written(what, value)}
    _require_part(what, value, named.tensor)
    return {path: _written(what, value)} if contents.is_mine(named.number, value) else {}


def _require_part(what: str, value: Any, param: Tensor) -> None:
    """Raise unless ranks can put a state together: each has its rows of it, or the same."""
    if not isinstance(value, Tensor) or not isinstance(param, DTensor) or not is_cut(param) or value.numel() == 1:
        return
    if not isinstance(value, DTensor) or (value.shape, value.placements) != (param.shape, param.placements):
        raise ValueError(
            f"cannot save {what}: it has shape {tuple(value.shape)}, and is neither one number nor cut like the "
            f"parameter, of shape {tuple(param.shape)}; save optimizer.state_dict() on each rank instead"
        )


def _written(what: str, value: Any) -> Tensor | bytes:
    """A value as an entry of a checkpoint."""
    try:
        return value.detach() if isinstance(value, Tensor) else pickle_value(value)
    except ValueError as error:
        raise ValueError(f"cannot save {what}: {error}") from None

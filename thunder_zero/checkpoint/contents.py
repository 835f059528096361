"""What one rank has of a model, of averages of it and of extras, by the names of a checkpoint.

They are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``, with the
plain module's names. Each rank's own values (extras, ignored parameters and their states) are under ``"rank<number>"``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from thunder_zero.checkpoint.dcp_write import Entries, KeyPath
from thunder_zero.optim.ema import EMA
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import ShardedModel, owners_of

MODEL, OPTIM, STATE, GROUPS, EXTRA = "model", "optim", "state", "param_groups", "extra"
EMAS = "ema"  # averages of parameters, by the name of their extra
COUNTS = "_counts"  # those of an EMA, next to its averages
EXTRA_STATE = "_extra_state"  # the end of the name of a module's extra state; other values that hooks add are not saved
RANK_KEY = re.compile(r"rank(\d{1,6})\.(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has of a model, or of the averages of one.

    Attributes:
        params: the parameters by name, a tied one under its first: DTensors, or full tensors (stage 0).
        aliases: the other names of tied parameters, with their first.
        ignored: parameters that the policy ignores, so that each rank has its own, by name.
        paths: in the plain module, by name; torch's wrappers take their own names out of state dicts.
        buffers: the buffers of the state dict, by name; rank 0's are saved.
        states: the modules' extra states, by name, with what loads them; rank 0's are saved.
        rank, ranks: this rank's number among all ranks, and how many they are.
        in_copy: its number among the ranks that share a copy of the model, and how many they are.
        writes: whether its copy is the one that is written (hybrid sharding has several).
        root: the path of all names.
        what: it is, in a message.
    """

    params: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    ignored: Mapping[str, Tensor]
    paths: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    states: Mapping[str, tuple[Any, Stateful]]
    rank: int
    ranks: int
    in_copy: tuple[int, int]
    writes: bool = True
    root: KeyPath = (MODEL,)
    what: str = "model"

    @property
    def rank_prefix(self) -> str:
        """The first part of the keys of values that belong to this rank alone."""
        return f"rank{self.rank}"

    def share(self, what: str, path: KeyPath, value: Any, turn: int | None) -> Entries:
        """What this rank writes of a value: its part, if it is cut; all, if this is the rank whose turn it is among
        those that have the same; all under its own path, if each rank has another (None)."""
        if turn is None:
            return {(self.rank_prefix, *path): written(what, value)}
        at, size = self.in_copy
        is_mine = self.writes and (is_cut(value) or turn % size == at)
        return {path: written(what, value)} if is_mine else {}

    def entries(self) -> Entries:
        """What this rank writes of it."""
        states = {name: value for name, (value, _) in self.states.items()}
        of_each_rank, of_rank_0 = self.ignored.items(), (*self.buffers.items(), *states.items())
        turns = [
            *enumerate(self.params.items()),
            *((None, one) for one in of_each_rank),
            *((0, one) for one in of_rank_0),
        ]
        entries: Entries = {(*self.root, alias): (*self.root, name) for alias, name in self.aliases.items()}
        for turn, (name, value) in turns:
            entries |= self.share(name, (*self.root, name), value, turn)
        return entries

    def averages(self, name: str, ema: EMA) -> Contents:
        """The averages of an EMA that is saved under a name, as contents of a model without buffers."""

        def averaged(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
            found = {name: ema.averages.get(self.paths[name]) for name in params}
            return {name: average for name, average in found.items() if average is not None}

        params = averaged(self.params)
        return replace(
            self,
            params=params,
            aliases={alias: of for alias, of in self.aliases.items() if of in params},
            ignored=averaged(self.ignored),
            buffers={},
            states={COUNTS: (ema.counts.state_dict(), ema.counts)},
            root=(EMAS, name, MODEL),
            what=f"EMA {name!r}",
        )


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
    others, mesh = {name: found[name] for name in paths if name not in planned}, state.plan.mesh
    own = [name for name in found if name.rpartition(".")[2] == EXTRA_STATE]
    return Contents(
        params={name: state.shards[path] for path, name in first.items()},
        aliases={name: first[path] for name, path in planned.items() if first[path] != name},
        ignored={name: value for name, value in others.items() if isinstance(value, nn.Parameter)},
        paths=paths,
        buffers={name: value for name, value in others.items() if not isinstance(value, nn.Parameter)},
        states={name: (found[name], _extra_state(plain.get_submodule(name.rpartition(".")[0]))) for name in own},
        rank=state.group.rank(),
        ranks=state.group.size(),
        in_copy=(mesh.shard.place, mesh.shard.size),
        writes=mesh.replicate.place == 0,
    )


def _extra_state(module: nn.Module) -> Stateful:
    return cast(Stateful, SimpleNamespace(state_dict=module.get_extra_state, load_state_dict=module.set_extra_state))


def extra_entries(contents: Contents, extra: Mapping[str, Any]) -> Entries:
    """What this rank writes of its extras: averages by rows, the others in one value."""
    entries, states = Entries(), dict[str, Any]()
    for name, value in extra.items():
        if isinstance(value, ShardedModel):
            raise TypeError(f"the extra {name!r} is a model; save it as a checkpoint of its own")
        if isinstance(value, Optimizer) and any(owners_of(parameters_of(value))):
            raise ValueError(
                f"the extra {name!r} is an optimizer of a sharded model, and an extra does not record which rows its "
                f"state is; pass it as optimizer, alone or in a list"
            )
        if isinstance(value, EMA):
            entries |= contents.averages(name, value).entries()
            continue
        states[name] = value.state_dict() if isinstance(value, Stateful) else value
        written(f"the extra {name!r}", states[name])
    return entries | contents.share(EXTRA, (EXTRA,), states, None)


def written(what: str, value: Any) -> Tensor | bytes:
    """A value as an entry of a checkpoint. Raises as :func:`pickled`."""
    return value.detach() if isinstance(value, Tensor) else pickled(what, value)


def pickled(what: str, value: Any) -> bytes:
    """A value as ``torch.save`` writes it, if ``torch.load(weights_only=True)`` reads it."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"cannot save {what}: torch.load(weights_only=True) cannot read an object of type {type(value).__name__}; "
            f"pass numbers, strings, tensors, or dicts and lists of them"
        ) from error
    return stream.getvalue()


def is_cut(value: object) -> TypeGuard[DTensor]:
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


def require_same_names(problem: str, saved: Iterable[str], here: Iterable[str], action: str) -> None:
    """Raise unless the same names are in a checkpoint as here."""
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        raise ValueError(f"{problem} (missing: {listed(missing)}; unexpected: {listed(unexpected)}); {action}")

"""Lists what one rank has of a model, of its averages and of extras, by the names of a checkpoint.

The names are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``,
with the plain module's names of parameters. Values that each rank has for itself (extras, ignored parameters and their
states) are under ``"rank<number>"``.
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
COUNTS = "_counts"  # the counts of an EMA, next to its averages
EXTRA_STATE = "_extra_state"  # ends the name of a module's extra state; other values that hooks add are not saved
RANK_KEY = re.compile(r"rank(\d{1,6})\.(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one rank has of a model, or of the averages of a model.

    Attributes:
        params: the parameters by name, a tied one under its first name: DTensors, or full tensors (stage 0).
        aliases: the first name of a tied parameter by each further name.
        ignored: parameters that the policy ignores, by name; each rank has its own values.
        paths: the path in the plain module by name; torch's wrappers leave their own names out of state dicts.
        buffers: the buffers of the state dict, by name; rank 0's are saved.
        states: the modules' extra states, by name, and the object that loads each; rank 0's are saved.
        rank, ranks: this rank's number among all ranks, and how many ranks there are.
        in_copy: this rank's number among the ranks that share a copy of the model, and how many share it.
        writes: True if this rank's copy is written (hybrid sharding has several copies).
        root: the beginning of the path of all names.
        what: what this is, in a message.
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

    def entries_of(self, what: str, path: KeyPath, value: Any, turn: int | None) -> Entries:
        """Return what this rank writes of a value.

        Every rank writes its part of a cut DTensor. Any other value is written by one of the ranks that have it: ranks
        take turns.

        Args:
            what: the value's name in a message.
            turn: numbers the values, to take turns. None: each rank has another value, and writes it under a path of
                its own.
        """
        if turn is None:
            return {(self.rank_prefix, *path): as_entry(what, value)}
        place, size = self.in_copy
        is_mine = self.writes and (is_cut(value) or turn % size == place)
        return {path: as_entry(what, value)} if is_mine else {}

    def entries(self) -> Entries:
        """Return what this rank writes of the model."""
        states = {name: value for name, (value, _) in self.states.items()}
        by_turn: list[tuple[int | None, tuple[str, Any]]] = [
            *enumerate(self.params.items()),
            *((None, item) for item in self.ignored.items()),
            *((0, item) for item in (*self.buffers.items(), *states.items())),
        ]
        entries: Entries = {(*self.root, alias): (*self.root, name) for alias, name in self.aliases.items()}
        for turn, (name, value) in by_turn:
            entries |= self.entries_of(name, (*self.root, name), value, turn)
        return entries

    def averages(self, name: str, ema: EMA) -> Contents:
        """Return the averages of an EMA, as contents of a model without buffers.

        Args:
            name: the EMA's name among the extras.
        """

        def averages_of(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
            averages = {name: ema.averages.get(self.paths[name]) for name in params}
            return {name: average for name, average in averages.items() if average is not None}

        params = averages_of(self.params)
        return replace(
            self,
            params=params,
            aliases={alias: first for alias, first in self.aliases.items() if first in params},
            ignored=averages_of(self.ignored),
            buffers={},
            states={COUNTS: (ema.counts.state_dict(), ema.counts)},
            root=(EMAS, name, MODEL),
            what=f"EMA {name!r}",
        )


def contents_of(model: ShardedModel) -> Contents:
    """Return what this rank has of a model. Parameters are shards, also inside ``full_parameters``."""
    state, plain = model.state, model.plain
    path_of = {id(tensor): path for path, tensor in chain(plain.named_parameters(), plain.named_buffers())}
    state_dict = plain.state_dict(keep_vars=True)
    paths = {name: path_of[id(value)] for name, value in state_dict.items() if id(value) in path_of}
    planned = {name: state.plan.by_name[path].path for name, path in paths.items() if path in state.plan.by_name}
    first = dict[str, str]()
    for name, path in planned.items():
        first.setdefault(path, name)
    others, mesh = {name: state_dict[name] for name in paths if name not in planned}, state.plan.mesh
    extra_states = [name for name in state_dict if name.rpartition(".")[2] == EXTRA_STATE]
    return Contents(
        params={name: state.shards[path] for path, name in first.items()},
        aliases={name: first[path] for name, path in planned.items() if first[path] != name},
        ignored={name: value for name, value in others.items() if isinstance(value, nn.Parameter)},
        paths=paths,
        buffers={name: value for name, value in others.items() if not isinstance(value, nn.Parameter)},
        states={
            name: (state_dict[name], _extra_state(plain.get_submodule(name.rpartition(".")[0])))
            for name in extra_states
        },
        rank=state.group.rank(),
        ranks=state.group.size(),
        in_copy=(mesh.shard.place, mesh.shard.size),
        writes=mesh.replicate.place == 0,
    )


def _extra_state(module: nn.Module) -> Stateful:
    """Return an object that saves and loads a module's extra state."""
    return cast(Stateful, SimpleNamespace(state_dict=module.get_extra_state, load_state_dict=module.set_extra_state))


def extra_entries(contents: Contents, extra: Mapping[str, Any]) -> Entries:
    """Return what this rank writes of its extras: averages by rows, and all other extras in one value.

    Raises:
        TypeError: an extra is a model.
        ValueError: an extra is an optimizer of a sharded model, or cannot be saved.
    """
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
        as_entry(f"the extra {name!r}", states[name])  # raises, with this extra's name
    return entries | contents.entries_of(EXTRA, (EXTRA,), states, None)


def as_entry(what: str, value: Any) -> Tensor | bytes:
    """Return a value as an entry of a checkpoint. Raises ValueError as :func:`pickle_value` does."""
    return value.detach() if isinstance(value, Tensor) else pickle_value(what, value)


def pickle_value(what: str, value: Any) -> bytes:
    """Return a value as ``torch.save`` writes it.

    Raises:
        ValueError: ``torch.load(weights_only=True)`` cannot read it; ``what`` names the value.
    """
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
    """Return whether each rank has a part of a value."""
    return isinstance(value, DTensor) and any(isinstance(placement, Shard) for placement in value.placements)


def split_rank_prefix(key: str) -> tuple[int, str] | None:
    """Return the rank that a key's value belongs to, and the rest of the key; None if the ranks share the value."""
    match = RANK_KEY.fullmatch(key)
    return None if match is None else (int(match[1]), match[2])


def name_some(names: Sequence[str]) -> str:
    """Return the first three names and the number of further ones, or "none", for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) + more) or "none"


def require_same_names(problem: str, saved: Iterable[str], here: Iterable[str], action: str) -> None:
    """Raise ValueError unless the names in a checkpoint are those of this rank."""
    missing, unexpected = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or unexpected:
        raise ValueError(f"{problem} (missing: {name_some(missing)}; unexpected: {name_some(unexpected)}); {action}")

"""Lists one rank's values of a model, its averages and extras, keyed by name in a checkpoint.

The names are those of FSDP2's ``get_state_dict``: ``{"model": ..., "optim": {"state": ..., "param_groups": ...}}``,
with the plain module's parameter names. Values that differ between ranks (extras, ignored parameters and their
states) are saved under ``"rank<number>"``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from thunder_zero.checkpoint.dcp_write import Entries, KeyPath
from thunder_zero.optim.ema import EMA
from thunder_zero.sharded.beside import RowsBeside
from thunder_zero.sharded.optimizers import parameters_of
from thunder_zero.sharded.sharded_model import ShardedModel, owner_of

MODEL, OPTIM, STATE, GROUPS, EXTRA = "model", "optim", "state", "param_groups", "extra"
EMAS = EMA.root  # the root of an EMA's averages, before the EMA's name
COUNTS = "_counts"  # numbers of tensors beside parameters, such as the updates of an EMA
EXTRA_STATE = "_extra_state"  # the last part of an extra state's name; other values that hooks add are not saved
RANK_KEY = re.compile(r"rank(\d{1,6})\.(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Contents:
    """One rank's values of a model, or of the averages of a model."""

    params: Mapping[str, Tensor]  # DTensors, or full tensors in stage 0. Tied parameters have their first name.
    aliases: Mapping[str, str]  # from further names of tied parameters to first names
    ignored: Mapping[str, Tensor]  # parameters that the policy ignores. Their values may differ between ranks.
    paths: Mapping[str, str]  # from names to paths in the plain module, with the parts that torch's wrappers add
    buffers: Mapping[str, Tensor]  # of the state dict. Rank 0 saves them.
    states: Mapping[str, tuple[Any, Stateful]]  # the modules' extra states, with objects that load them. Rank 0 saves.
    rank: int
    ranks: int
    replica_rank: int  # this rank's number among the ranks of its replica
    replica_size: int
    is_writer: bool = True  # True if this rank's replica writes the checkpoint. Hybrid sharding has several replicas.
    root: KeyPath = (MODEL,)  # the common first parts of the keys
    label: str = "model"  # a noun for these values in error messages

    @property
    def rank_prefix(self) -> str:
        """The first part of a key whose value only this rank has."""
        return f"rank{self.rank}"

    def entries_of(self, label: str, path: KeyPath, value: Any, turn: int | None) -> Entries:
        """Return the entry that this rank writes for a value, or {} if another rank writes the value.

        Every rank writes its part of a sharded DTensor. Ranks take turns to write values that are equal on all ranks:
        ``turn`` is the index of the value. With None, ranks have different values, and each writes its value under its
        own prefix.
        """
        if turn is None:
            return {(self.rank_prefix, *path): as_entry(label, value)}
        is_mine = self.is_writer and (is_cut(value) or turn % self.replica_size == self.replica_rank)
        return {path: as_entry(label, value)} if is_mine else {}

    def entries(self) -> Entries:
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

    def beside(self, name: str, extra: RowsBeside) -> list[Contents]:
        """Return the tensors beside parameters, the extra ``name``, as contents of models without buffers."""
        label, contents = f"{extra.noun} {name!r}", list[Contents]()
        for kind, tensors in extra.saved().items():
            params, ignored = (
                {name: tensors[path] for name in values if (path := self.paths[name]) in tensors}
                for values in (self.params, self.ignored)
            )
            counts = {} if contents else {COUNTS: (extra.counts.state_dict(), extra.counts)}
            aliases = {alias: first for alias, first in self.aliases.items() if first in params}
            root = (extra.root, name, kind)
            contents.append(
                replace(
                    self,
                    params=params,
                    aliases=aliases,
                    ignored=ignored,
                    buffers={},
                    states=counts,
                    root=root,
                    label=label,
                )
            )
        return contents


def contents_of(model: ShardedModel) -> Contents:
    """Return this rank's values of a model. Parameters are shards, even inside ``full_parameters``."""
    state, plain = model.state, model.plain
    path_of = {id(tensor): path for path, tensor in chain(plain.named_parameters(), plain.named_buffers())}
    state_dict = plain.state_dict(keep_vars=True)
    paths = {name: path_of[id(value)] for name, value in state_dict.items() if id(value) in path_of}
    planned = {name: state.plan.by_name[path].path for name, path in paths.items() if path in state.plan.by_name}
    first_names = dict[str, str]()
    for name, path in planned.items():
        first_names.setdefault(path, name)
    unplanned, mesh = {name: state_dict[name] for name in paths if name not in planned}, state.plan.mesh
    extra_states = [name for name in state_dict if name.rpartition(".")[2] == EXTRA_STATE]
    return Contents(
        params={name: state.params[path].shard for path, name in first_names.items()},
        aliases={name: first_names[path] for name, path in planned.items() if first_names[path] != name},
        ignored={name: value for name, value in unplanned.items() if isinstance(value, nn.Parameter)},
        paths=paths,
        buffers={name: value for name, value in unplanned.items() if not isinstance(value, nn.Parameter)},
        states={
            name: (state_dict[name], _ExtraState(plain.get_submodule(name.rpartition(".")[0]))) for name in extra_states
        },
        rank=state.group.rank(),
        ranks=state.group.size(),
        replica_rank=mesh.shard.place,
        replica_size=mesh.shard.size,
        is_writer=mesh.replicate.place == 0,
    )


class _ExtraState:
    def __init__(self, module: nn.Module) -> None:
        self.state_dict, self.load_state_dict = module.get_extra_state, module.set_extra_state


def extra_entries(contents: Contents, extra: Mapping[str, Any]) -> Entries:
    """Return the entries that this rank writes for extras: averages by rows, all other extras in one value."""
    entries, states = Entries(), dict[str, Any]()
    for name, value in extra.items():
        if isinstance(value, ShardedModel):
            raise TypeError(f"the extra {name!r} is a model; save it as a checkpoint of its own")
        if isinstance(value, Optimizer) and any(map(owner_of, parameters_of(value))):
            raise ValueError(
                f"the extra {name!r} is an optimizer of a sharded model, and an extra does not record which rows its "
                f"state is; pass it as optimizer, alone or in a list"
            )
        if isinstance(value, RowsBeside):
            for beside in contents.beside(name, value):
                entries |= beside.entries()
            continue
        states[name] = value.state_dict() if isinstance(value, Stateful) else value
        as_entry(f"the extra {name!r}", states[name])  # so that an error names this extra
    return entries | contents.entries_of(EXTRA, (EXTRA,), states, None)


def as_entry(label: str, value: Any) -> Tensor | bytes:
    return value.detach() if isinstance(value, Tensor) else pickle_value(label, value)


def pickle_value(label: str, value: Any) -> bytes:
    """Return the bytes of ``torch.save``. Raise ValueError if ``torch.load(weights_only=True)`` cannot read them."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"cannot save {label}: torch.load(weights_only=True) cannot read an object of type {type(value).__name__}; "
            f"pass numbers, strings, tensors, or dicts and lists of them"
        ) from error
    return stream.getvalue()


def is_cut(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor that is sharded over ranks."""
    return isinstance(value, DTensor) and any(isinstance(placement, Shard) for placement in value.placements)


def split_rank_prefix(key: str) -> tuple[int, str] | None:
    match = RANK_KEY.fullmatch(key)
    return None if match is None else (int(match[1]), match[2])


def name_some(names: Sequence[str]) -> str:
    """Return the first three names and the number of further names, or "none", for a message."""
    suffix = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(map(repr, names[:3])) + suffix) or "none"


def require_same_names(problem: str, saved: Iterable[str], expected: Iterable[str], action: str) -> None:
    missing, unexpected = sorted(set(expected) - set(saved)), sorted(set(saved) - set(expected))
    if missing or unexpected:
        raise ValueError(f"{problem} (missing: {name_some(missing)}; unexpected: {name_some(unexpected)}); {action}")

"""Writes and reads extras: each rank's own values, such as a scheduler or RNG state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from thunder_zero.checkpoint.averages import average_entries, emas_of, without_emas
from thunder_zero.checkpoint.contents import EXTRA, Contents, Values, pickle_value, split_rank_prefix
from thunder_zero.checkpoint.dcp_read import read_entries
from thunder_zero.checkpoint.dcp_write import Entries
from thunder_zero.runtime.optimizers import parameters_of
from thunder_zero.runtime.sharded_model import ShardedModel, owners_of

NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})


def require_named(extra: Mapping[str, Any]) -> None:
    """Raise unless extras are a mapping from names.

    Raises:
        TypeError: they are not.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise TypeError(f"extra is {extra!r}; pass a mapping from names to values, such as {{'scheduler': scheduler}}")


def require_stateful(extra: Mapping[str, object]) -> None:
    """Raise unless each extra can take what was saved under its name.

    Raises:
        TypeError: one cannot.
    """
    for name, thing in extra.items():
        if not isinstance(thing, Stateful):
            raise TypeError(
                f"cannot load into the extra {name!r}: an object of type {type(thing).__name__} has no state_dict and "
                f"load_state_dict; leave it out, and read it from Loaded.own"
            )


def extra_entries(contents: Contents, extra: Mapping[str, Any]) -> Entries:
    """What this rank writes of its extras.

    Raises:
        TypeError: an extra is a model.
        ValueError: ``torch.load(weights_only=True)`` does not read it, or it is an optimizer of shards.
    """
    values: Values = {}
    for name, value in without_emas(extra).items():
        if isinstance(value, ShardedModel):
            raise TypeError(f"the extra {name!r} is a model; save it as a checkpoint of its own")
        if isinstance(value, Optimizer) and any(owners_of(parameters_of(value))):
            raise ValueError(
                f"the extra {name!r} is an optimizer of a sharded model, and an extra does not record which rows its "
                f"state is; pass it as optimizer, alone or in a list"
            )
        state = value.state_dict() if isinstance(value, Stateful) else value
        try:
            values[contents.rank_prefix, EXTRA, name] = pickle_value(state)
        except ValueError as error:
            raise ValueError(f"cannot save the extra {name!r}: {error}") from None
    return average_entries(contents, emas_of(extra)) | Entries(values, {})


def read_extras(folder: Path, metadata: Metadata, ranks: int = 0) -> tuple[dict[str, Any], ...]:
    """The extras of each rank that saved, by name; ``ranks`` is how many saved, if known.

    Raises:
        ValueError: the files are damaged.
    """
    paths = {}
    for key in metadata.state_dict_metadata:
        rank, rest = split_rank_prefix(key) or (0, "")
        if rest.startswith(f"{EXTRA}."):
            paths[key] = rank, rest.removeprefix(f"{EXTRA}.")
    values = read_entries(folder, metadata, paths)
    most = max((rank + 1 for rank, _ in paths.values()), default=0)
    of_rank: list[dict[str, Any]] = [{} for _ in range(max(most, ranks))]
    for key, (rank, name) in paths.items():
        of_rank[rank][name] = values[key]
    return tuple(of_rank)


def own_extras(of_rank: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:
    """The extras that this rank saved; if another number of ranks saved, those that all of them saved alike."""
    if len(of_rank) == ranks:
        return dict(of_rank[rank])
    return {name: value for name, value in (of_rank[0] if of_rank else {}).items() if _is_alike(name, of_rank)}


def require_extras(
    names: Sequence[str], own: Mapping[str, Any], of_rank: Sequence[Mapping[str, Any]], ranks: int
) -> None:
    """Raise unless this rank has a value for each of these names.

    Raises:
        ValueError: nobody saved it; another number of ranks saved, and their values differ.
    """
    for name in names:
        if not any(name in extras for extras in of_rank):
            raise ValueError(
                f"the checkpoint has no extra {name!r}: it has {sorted(set().union(*of_rank))}; leave it out of extra"
            )
        if name not in own:
            raise ValueError(
                f"cannot load the extra {name!r} on {ranks} ranks: it differs between the {len(of_rank)} ranks that "
                f"saved; leave it out, and take what you need from Loaded.of_rank"
            )


def _is_alike(name: str, of_rank: Sequence[Mapping[str, Any]]) -> bool:
    first = pickle_value(of_rank[0][name])
    return all(name in extras and pickle_value(extras[name]) == first for extras in of_rank[1:])

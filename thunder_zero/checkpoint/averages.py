"""Writes and reads the averages of an ``EMA``, under the name of its extra."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero.checkpoint.commit import Pairs, States
from thunder_zero.checkpoint.contents import EMAS, MODEL, Contents, Values, listed, pickle_value
from thunder_zero.checkpoint.dcp_read import read_entries
from thunder_zero.checkpoint.dcp_write import KeyPath, key_of
from thunder_zero.comm.agree import Fact
from thunder_zero.runtime.dtensors import local
from thunder_zero.runtime.ema import EMA
from thunder_zero.runtime.state import State

COUNTS = "counts"
Extras = Mapping[str, Any]


def emas_of(extra: Extras) -> dict[str, EMA]:
    """The EMAs among extras, by name."""
    return {name: value for name, value in extra.items() if isinstance(value, EMA)}


def without_emas(extra: Extras) -> dict[str, Any]:
    """The other extras, by name."""
    return {name: value for name, value in extra.items() if not isinstance(value, EMA)}


def require_own(emas: Mapping[str, EMA], state: State) -> None:
    """Raise unless EMAs are of this model.

    Raises:
        ValueError: one is of another model.
    """
    for name, ema in emas.items():
        if ema.state is not state:
            raise ValueError(
                f"the extra {name!r} is an EMA of {ema.state.name}, and the model is {state.name}; pass the model that "
                f"it averages"
            )


def average_facts(emas: Mapping[str, EMA]) -> list[Fact]:
    """What ranks have to agree on."""
    return [ema.fact(f"the extra {name!r}, an EMA,") for name, ema in emas.items()]


def _shared(contents: Contents, name: str, ema: EMA) -> dict[KeyPath, Tensor]:
    """The averages of parameters that ranks share."""
    found = {of: ema.averages.get(contents.paths[of]) for of in contents.params}
    return {(EMAS, name, MODEL, of): average for of, average in found.items() if average is not None}


def _own(contents: Contents, name: str, ema: EMA) -> dict[KeyPath, Tensor]:
    """The averages of this rank's ignored parameters."""
    found = {of: ema.averages.get(contents.paths[of]) for of in contents.ignored}
    prefix = contents.rank_prefix, EMAS, name, MODEL
    return {(*prefix, of): average for of, average in found.items() if average is not None}


def average_aliases(contents: Contents, emas: Mapping[str, EMA]) -> dict[KeyPath, KeyPath]:
    """The other paths of averages of tied parameters, with their first."""
    return {
        (EMAS, name, MODEL, alias): (EMAS, name, MODEL, of)
        for name, ema in emas.items()
        for alias, of in contents.aliases.items()
        if contents.paths[of] in ema.averages
    }


def average_values(contents: Contents, emas: Mapping[str, EMA]) -> Values:
    """What this rank writes of EMAs."""
    values: Values = {}
    for name, ema in emas.items():
        for number, (path, average) in enumerate(_shared(contents, name, ema).items()):
            if contents.is_mine(number, average):
                values[path] = average.detach()
        values |= _own(contents, name, ema)
        if contents.rank == 0:
            values[EMAS, name, COUNTS] = pickle_value(ema.counts.state_dict())
    return values


def read_averages(
    folder: Path, contents: Contents, metadata: Metadata, emas: Mapping[str, EMA]
) -> tuple[Pairs, States]:
    """This rank's parts of the averages with their new values, in new memory; and the counts to load.

    Raises:
        ValueError: it has none under such a name, or of other parameters; or it is damaged.
    """
    tensors, states = [], []
    for name, ema in emas.items():
        own = {key_of(path): tensor for path, tensor in _shared(contents, name, ema).items()}
        own |= {key_of(path): tensor for path, tensor in _own(contents, name, ema).items()}
        aliases = {key_of(alias) for alias in average_aliases(contents, {name: ema})}
        _require_averages(name, own, aliases, contents, metadata)
        counts = key_of((EMAS, name, COUNTS))
        read = read_entries(folder, metadata, [*own, counts], own)
        tensors += [(local(tensor), read[key]) for key, tensor in own.items()]
        states.append((ema.counts, partial(ema.counts.load_state_dict, read[counts])))
    return tensors, states


def _require_averages(
    name: str, own: Mapping[str, Tensor], aliases: set[str], contents: Contents, metadata: Metadata
) -> None:
    stored = metadata.state_dict_metadata
    prefix = f"{EMAS}.{name}."
    if f"{prefix}{COUNTS}" not in stored:
        raise ValueError(f"the checkpoint has no EMA {name!r}; leave it out of extra, or load another checkpoint")
    in_file = {key for key in stored if key.startswith((f"{prefix}{MODEL}.", f"{contents.rank_prefix}.{prefix}"))}
    if missing := (own.keys() | aliases) ^ in_file:
        raise ValueError(
            f"the EMA {name!r} of the checkpoint averages other parameters than this one ({listed(sorted(missing))}); "
            f"make it of the same parameters: those that required gradients"
        )
    for key, average in own.items():
        found = stored[key]
        saved = (found.size, found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        if saved != (average.shape, average.dtype):
            raise ValueError(
                f"the EMA {name!r} of the checkpoint is of another model: {key} is not a tensor of shape "
                f"{tuple(average.shape)} and dtype {average.dtype} in it; build the model as it was saved"
            )

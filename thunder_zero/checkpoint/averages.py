"""Writes and reads the averages of an ``EMA``, under the name of its extra."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from thunder_zero.checkpoint.commit import Pairs, States
from thunder_zero.checkpoint.contents import EMAS, MODEL, Contents, listed, model_entries, pickle_value
from thunder_zero.checkpoint.dcp_read import read_entries
from thunder_zero.checkpoint.dcp_write import Entries, key_of
from thunder_zero.checkpoint.read_model import keys_of, read_tensors
from thunder_zero.comm.agree import Fact
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


def as_model(contents: Contents, ema: EMA) -> Contents:
    """The averages of an EMA, as contents of a model without buffers."""

    def averaged(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {name: ema.averages.get(contents.paths[name]) for name in params}
        return {name: average for name, average in found.items() if average is not None}

    params = averaged(contents.params)
    aliases = {alias: name for alias, name in contents.aliases.items() if name in params}
    return replace(contents, params=params, aliases=aliases, ignored=averaged(contents.ignored), buffers={}, states={})


def average_entries(contents: Contents, emas: Mapping[str, EMA]) -> Entries:
    """What this rank writes of EMAs."""
    entries = Entries({}, {})
    for name, ema in emas.items():
        entries |= model_entries(as_model(contents, ema), (EMAS, name, MODEL))
        if contents.rank == 0:
            entries |= Entries({(EMAS, name, COUNTS): pickle_value(ema.counts.state_dict())}, {})
    return entries


def read_averages(
    folder: Path, contents: Contents, metadata: Metadata, emas: Mapping[str, EMA]
) -> tuple[Pairs, States]:
    """This rank's parts of the averages with their new values, in new memory; and the counts to load.

    Raises:
        ValueError: it has none under such a name, or of other parameters; or it is damaged.
    """
    tensors: list[tuple[Tensor, Tensor]] = []
    states: list[tuple[Any, Callable[[], object]]] = []
    stored = metadata.state_dict_metadata
    for name, ema in emas.items():
        prefix, counts = (f"{key_of((EMAS, name, part))}" for part in (MODEL, COUNTS))
        if counts not in stored:
            raise ValueError(f"the checkpoint has no EMA {name!r}; leave it out of extra, or load another checkpoint")
        keys = keys_of(as_model(contents, ema), stored, f"{prefix}.")
        if missing := sorted(keys.all ^ keys.in_file):
            raise ValueError(
                f"the EMA {name!r} of the checkpoint averages other parameters than this one ({listed(missing)}); "
                f"make it of the same parameters: those that required gradients"
            )
        found, _ = read_tensors(folder, metadata, keys, f"the EMA {name!r} of the checkpoint")
        tensors += found
        value = read_entries(folder, metadata, [counts])[counts]
        states.append((ema.counts, partial(ema.counts.load_state_dict, value)))
    return tensors, states

"""Writes and reads the averages of an ``EMA``, by rows, under the extra's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero.checkpoint.collect import rows_item
from thunder_zero.checkpoint.dcp_read import read_items
from thunder_zero.checkpoint.item import Item, KeyPath, item_of_tensor, pickle_value
from thunder_zero.comm.agree import Fact
from thunder_zero.runtime.ema import EMA
from thunder_zero.runtime.state import State
from thunder_zero.state_dict.all_or_nothing import ValuesToWrite
from thunder_zero.state_dict.contents import EMAS, MODEL, ModelContents, listed, rows_of

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


@dataclass(frozen=True, slots=True)
class Average:
    """The average of a parameter.

    Attributes:
        item: this rank's rows of it, without padding: a view.
        writes: whether this rank writes them.
    """

    item: Item
    writes: bool


def averages_of(contents: ModelContents, name: str, ema: EMA) -> Iterator[Average]:
    """The averages of an EMA that is saved under this name."""
    prefix: KeyPath = (EMAS, name, MODEL)
    for number, param in enumerate(contents.plan.params):
        average = ema.average_of(contents.shards[param.path])
        if average is not None:
            also = [(*prefix, alias) for alias in param.aliases]
            start, stop = rows_of(contents, param)
            writes = (contents.writes and start < stop) if param.sharded else contents.writes_whole(number)
            yield Average(rows_item(contents, param, (*prefix, param.path), average, also), writes)
    for path, tensor in contents.ignored.items():
        average = ema.average_of(tensor)
        if average is not None:
            yield Average(item_of_tensor((contents.rank_prefix, *prefix, path), average), True)


def average_items(contents: ModelContents, emas: Mapping[str, EMA]) -> list[Item]:
    """The items that this rank writes of EMAs."""
    items = []
    for name, ema in emas.items():
        items += [average.item for average in averages_of(contents, name, ema) if average.writes]
        if contents.rank == 0:
            items.append(Item((EMAS, name, COUNTS), pickle_value(ema.counts.state_dict())))
    return items


def read_averages(folder: Path, contents: ModelContents, metadata: Metadata, emas: Mapping[str, EMA]) -> ValuesToWrite:
    """This rank's rows of the averages in a checkpoint, in new memory.

    Raises:
        ValueError: it has none under such a name, or of other parameters; or it is damaged.
    """
    tensors: list[tuple[Tensor, Tensor]] = []
    states: list[tuple[Any, Any]] = []
    for name, ema in emas.items():
        own = [average.item for average in averages_of(contents, name, ema)]
        _require_averages(name, own, contents, metadata)
        counts = Item((EMAS, name, COUNTS), b"").key
        new = [replace(item, value=torch.empty_like(_rows(item), device="cpu"), also=()) for item in own]
        read = read_items(folder, metadata, new, [counts])
        tensors += [(_rows(item), _rows(value)) for item, value in zip(own, new, strict=True)]
        states.append((ema.counts, partial(ema.counts.load_state_dict, read[counts])))
    return ValuesToWrite(tensors, states)


def _rows(item: Item) -> Tensor:
    assert isinstance(item.value, Tensor), "an average is a tensor"
    return item.value


def _require_averages(name: str, own: list[Item], contents: ModelContents, metadata: Metadata) -> None:
    stored = metadata.state_dict_metadata
    prefix = f"{EMAS}.{name}."
    if f"{prefix}{COUNTS}" not in stored:
        raise ValueError(f"the checkpoint has no EMA {name!r}; leave it out of extra, or load another checkpoint")
    in_file = {key for key in stored if key.startswith((f"{prefix}{MODEL}.", f"{contents.rank_prefix}.{prefix}"))}
    here = {key for item in own for key in (item.key, *(Item(path, b"").key for path in item.also))}
    if missing := here ^ in_file:
        raise ValueError(
            f"the EMA {name!r} of the checkpoint averages other parameters than this one ({listed(sorted(missing))}); "
            f"make it of the same parameters: those that required gradients"
        )
    for item in own:
        found, shape, dtype = stored[item.key], item.shape, _rows(item).dtype
        saved = (tuple(found.size), found.properties.dtype) if isinstance(found, TensorStorageMetadata) else None
        if saved != (shape, dtype):
            raise ValueError(
                f"the EMA {name!r} of the checkpoint is of another model: {item.key} is not a tensor of shape {shape} "
                f"and dtype {dtype} in it; build the model as it was saved"
            )

"""Reads a checkpoint's optimizers for this rank, and checks that they are the same optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from thunder_zero.checkpoint.dcp_read import read_items
from thunder_zero.checkpoint.item import Item, key_of
from thunder_zero.runtime.optimizers import class_name
from thunder_zero.state_dict.contents import (
    GROUPS,
    OPTIM,
    OPTIMIZER_CLASS,
    STATE,
    ModelContents,
    Named,
    all_named_groups,
    groups_of,
    listed,
    named_groups,
    numbered_state_dict,
    rows_of,
)


@dataclass(frozen=True, slots=True)
class StateRows:
    """A state of a parameter in a checkpoint.

    Attributes:
        named: the parameter.
        name: the state's, such as ``"exp_avg"``.
        item: this rank's rows; None if the state is not a tensor.
    """

    named: Named
    name: str
    item: Item | None


def read_optimizers(
    folder: Path, metadata: Metadata, contents: ModelContents, optimizers: Sequence[Optimizer]
) -> list[dict[str, Any]]:
    """A state dict for ``Optimizer.load_state_dict`` of each optimizer.

    Raises:
        ValueError: the checkpoint has no optimizer, other parameter groups, optimizers of another class, or states that
            cannot be cut into rows; or it is damaged.
    """
    stored = metadata.state_dict_metadata
    groups = all_named_groups(contents, optimizers)
    states = _states_of(contents, list(chain(*groups)), stored)
    hyper = [key for key in stored if key.startswith(f"{OPTIM}.{GROUPS}.")]
    classes = [key for number in range(len(optimizers)) if (key := f"{OPTIMIZER_CLASS}.{number}") in stored]
    items = [state.item for state in states.values() if state.item is not None]
    items += [
        Item(tuple(key.split(".")), torch.empty(found.size, dtype=found.properties.dtype), 0, tuple(found.size))
        for key in hyper
        if isinstance(found := stored[key], TensorStorageMetadata)
    ]
    plain = [key for key in (*states, *hyper, *classes) if not isinstance(stored[key], TensorStorageMetadata)]
    values = {**read_items(folder, metadata, items, plain), **{item.key: item.value for item in items}}
    saved = groups_of({key.removeprefix(f"{OPTIM}.{GROUPS}."): values[key] for key in hyper})
    require_groups(saved, [[named.name for named in group] for group in groups])
    require_classes({key: values[key] for key in classes}, optimizers)
    by_param: dict[str, dict[str, Any]] = {}
    for key, state in states.items():
        by_param.setdefault(state.named.name, {})[state.name] = _with_padding(contents, state, values[key])
    return [
        numbered_state_dict([saved.pop(0) for _ in own], own, by_param)
        for own in (named_groups(contents, optimizer) for optimizer in optimizers)
    ]


def require_groups(saved: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> None:
    """Raise unless each parameter group has the parameters that it had when it was saved.

    Raises:
        ValueError: the groups differ, or the checkpoint has no optimizer.
    """
    if not saved:
        raise ValueError("the checkpoint has no optimizer; load without one")
    if len(saved) != len(here):
        raise ValueError(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this one has {len(here)}; build the "
            f"optimizer as it was saved"
        )
    for number, (group, names) in enumerate(zip(saved, here, strict=True)):
        if "params" not in group:
            raise ValueError(
                f"parameter group {number} of the checkpoint's optimizer lists no parameters; use another checkpoint"
            )
        missing, unexpected = sorted(set(names) - set(group["params"])), sorted(set(group["params"]) - set(names))
        if missing or unexpected:
            raise ValueError(
                f"parameter group {number} of the checkpoint's optimizer has other parameters (missing: "
                f"{listed(missing)}; unexpected: {listed(unexpected)}); build the optimizer as it was saved"
            )


def require_classes(saved: Mapping[str, str], optimizers: Sequence[Optimizer]) -> None:
    """Raise unless optimizers are of the classes that were saved; other tools do not save them.

    Raises:
        ValueError: one is of another class, which might take the state for something else without an error.
    """
    for number, optimizer in enumerate(optimizers):
        here = class_name(optimizer)
        found = saved.get(f"{OPTIMIZER_CLASS}.{number}", here)
        if found != here:
            raise ValueError(
                f"the checkpoint's optimizer is {found}, this one is {here}; pass an optimizer of the saved class, or "
                f"load without it"
            )


def _states_of(contents: ModelContents, members: Sequence[Named], stored: Mapping[str, Any]) -> dict[str, StateRows]:
    """The states of these parameters in a checkpoint, by key."""
    prefixes = {
        key_of((*(() if named.param else (contents.rank_prefix,)), OPTIM, STATE, named.name)): named
        for named in members
        if named.owner in (None, contents.plan.rank)  # whole states are read by their owner alone
    }
    states = {}
    for key, found in stored.items():
        prefix, dot, name = key.rpartition(".")
        while dot and prefix not in prefixes:  # another tool's states may have dots in their names
            prefix, dot, more = prefix.rpartition(".")
            name = f"{more}.{name}"
        if dot:
            states[key] = StateRows(prefixes[prefix], name, _rows_to_read(contents, prefixes[prefix], key, found))
    return states


def _rows_to_read(contents: ModelContents, named: Named, key: str, found: Any) -> Item | None:
    if not isinstance(found, TensorStorageMetadata):
        return None
    param, shape, start = named.param, tuple(found.size), 0
    rows = shape
    if param is not None and param.sharded and named.owner is None:
        if shape == param.shape:
            start, stop = rows_of(contents, param)
            rows = (stop - start, *shape[1:])
        elif found.size.numel() != 1:
            raise ValueError(
                f"{key} cannot be cut into rows: its shape is {shape}, the parameter's is {param.shape}; load it into "
                f"an optimizer made by tz.whole, or where the parameter is replicated (stage 0)"
            )
    return Item((key,), torch.empty(rows, dtype=found.properties.dtype), start, shape)


def _with_padding(contents: ModelContents, state: StateRows, value: Any) -> Any:
    param, item = state.named.param, state.item
    if item is None or state.named.owner is not None or param is None or not param.sharded or item.shape != param.shape:
        return value
    rows = value.new_zeros(contents.plan.shard_shape(param))
    rows[: len(value)] = value
    return rows

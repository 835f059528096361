"""Reads a checkpoint's model for this rank, and checks that it is the same model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero.checkpoint.collect import rows_item
from thunder_zero.checkpoint.dcp_read import places_by_key, read_items
from thunder_zero.checkpoint.item import Item, KeyPath, key_of
from thunder_zero.state_dict.contents import MODEL, OPTIM, ModelContents, listed, split_rank_prefix

BUILD = "build the model as it was saved"


def read_model(
    folder: Path, metadata: Metadata, contents: ModelContents
) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """Pairs of the model's tensors and their new values; and the modules' extra states, by name.

    Raises:
        ValueError: the checkpoint is of another model, or damaged.
    """
    require_model(contents, metadata.state_dict_metadata)
    pairs, items, twins = [], [], []
    places = places_by_key(metadata)

    def new_item(path: KeyPath, target: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
        value = torch.empty_like(target, device="cpu")
        items.append(Item(path, value, start, shape))
        return value

    for param in contents.plan.params:
        own = rows_item(contents, param, (MODEL, param.path), contents.shards[param.path])
        assert isinstance(own.value, Tensor), "a parameter is a tensor"
        value = new_item(own.path, own.value, own.start, own.shape)
        pairs.append((own.value, value))
        for alias in param.aliases:
            if places.get(own.key) != places.get(key_of((MODEL, alias))):
                twin = new_item((MODEL, alias), own.value, own.start, own.shape)
                twins.append((param.path, alias, value, twin))
    for name, tensor in contents.buffers.items():
        pairs.append((tensor, new_item((MODEL, name), tensor, 0, tuple(tensor.shape))))
    for name, tensor in contents.ignored.items():
        own_path = (contents.rank_prefix, MODEL, name)
        pairs.append((tensor.detach(), new_item(own_path, tensor.detach(), 0, tuple(tensor.shape))))
    keys = {key_of((MODEL, name)): name for name in contents.states}
    values = read_items(folder, metadata, items, list(keys))
    for path, alias, first, second in twins:  # another tool wrote it twice, or they were not tied
        if not torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)):
            raise ValueError(
                f"the checkpoint is of another model: {path!r} and {alias!r} are tied here, and differ in it; {BUILD}"
            )
    return pairs, {keys[key]: value for key, value in values.items()}


def require_model(contents: ModelContents, stored: Mapping[str, Any]) -> None:
    """Raise unless a checkpoint is of this model.

    Raises:
        ValueError: names are missing or unexpected; a shape or a dtype differs.
    """
    plan, own_model = contents.plan, f"{contents.rank_prefix}.{MODEL}."
    expected = {f"{MODEL}.{name}": (param.shape, param.dtype) for param in plan.params for name in param.names}
    tensors = {f"{MODEL}.{name}": tensor for name, tensor in contents.buffers.items()}
    tensors |= {f"{own_model}{name}": tensor for name, tensor in contents.ignored.items()}
    expected |= {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    _require_as_many_ranks(plan.ranks, stored)
    here = expected.keys() | {f"{MODEL}.{name}" for name in contents.states}
    in_file = {key for key in stored if key.startswith((f"{MODEL}.", own_model))}
    missing, unexpected = sorted(here - in_file), sorted(in_file - here)
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint is of another model (missing: {listed(missing)}; unexpected: {listed(unexpected)}); "
            f"{BUILD}"
        )
    for key, (shape, dtype) in expected.items():
        found = stored[key]
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"the checkpoint is of another model: {key} is not a tensor in it; {BUILD}")
        if tuple(found.size) != shape or found.properties.dtype != dtype:
            raise ValueError(
                f"the checkpoint is of another model: {key} has shape {tuple(found.size)} and dtype "
                f"{found.properties.dtype} in it, shape {shape} and dtype {dtype} here; {BUILD}"
            )


def _require_as_many_ranks(here: int, stored: Mapping[str, Any]) -> None:
    """Raise if ranks saved values of their own, and another number of ranks loads them."""
    split = [split_rank_prefix(key) or (0, "") for key in stored]
    ranks = {rank for rank, rest in split if rest.startswith((f"{MODEL}.", f"{OPTIM}."))}
    if ranks and ranks != set(range(here)):
        raise ValueError(
            f"cannot load on {here} ranks: the checkpoint has values of ignored parameters from each of {len(ranks)} "
            f"ranks; load it on {len(ranks)} ranks"
        )

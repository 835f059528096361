"""Reads a checkpoint's model for this rank, and checks that it is the same model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_zero.checkpoint.commit import Pairs
from thunder_zero.checkpoint.contents import MODEL, OPTIM, Contents, listed, split_rank_prefix
from thunder_zero.checkpoint.dcp_read import places_by_key, read_entries
from thunder_zero.checkpoint.roots import model_prefix
from thunder_zero.runtime.dtensors import local

BUILD = "build the model as it was saved"


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a checkpoint has, or should have, the parts of a model.

    Attributes:
        prefix: of the keys that ranks share.
        tensors: parameters, ignored ones and buffers, by key.
        twins: the keys of other names of tied parameters, with those of their first.
        states: the names of the modules' extra states, by key.
        in_file: the keys of a model in the checkpoint.
    """

    prefix: str
    tensors: Mapping[str, Tensor]
    twins: Mapping[str, str]
    states: Mapping[str, str]
    in_file: AbstractSet[str]

    @property
    def all(self) -> set[str]:
        """All keys."""
        return {*self.tensors, *self.twins, *self.states}


def read_model(folder: Path, metadata: Metadata, contents: Contents) -> tuple[Pairs, dict[str, Any]]:
    """This rank's parts of the model's tensors and their new values; and the modules' extra states, by name.

    Raises:
        ValueError: the checkpoint is of another model, or damaged.
    """
    stored = metadata.state_dict_metadata
    keys = keys_of(contents, stored, model_prefix([*contents.params, *contents.buffers], stored))
    _require_as_many_ranks(contents.ranks, stored)
    missing, unexpected = sorted(keys.all - stored.keys()), sorted(keys.in_file - keys.all)
    if missing or unexpected:
        raise ValueError(
            f"the checkpoint is of another model (missing: {listed(missing)}; unexpected: {listed(unexpected)}); "
            f"{BUILD}"
        )
    return read_tensors(folder, metadata, keys, "the checkpoint")


def keys_of(contents: Contents, stored: Mapping[str, Any], prefix: str) -> Keys:
    """Where a checkpoint has the parts of a model whose shared keys begin with a prefix; at the top, without one, there
    may be anything else."""
    own = f"{contents.rank_prefix}.{prefix or f'{MODEL}.'}"
    tensors = {prefix + name: tensor for name, tensor in (*contents.params.items(), *contents.buffers.items())}
    for name, tensor in contents.ignored.items():  # FSDP2's are as the others
        shared = own + name not in stored and prefix + name in stored
        tensors[prefix + name if shared else own + name] = tensor
    twins = {prefix + alias: prefix + name for alias, name in contents.aliases.items()}
    states = {prefix + name: name for name in contents.states}
    in_file = {key for key in stored if key.startswith((prefix, own) if prefix else own)}
    return Keys(prefix, tensors, twins, states, in_file)


def read_tensors(folder: Path, metadata: Metadata, keys: Keys, what: str) -> tuple[Pairs, dict[str, Any]]:
    """What :func:`read_model` returns, of these keys, which are there.

    Raises:
        ValueError: a shape or a dtype differs, or tied parameters do; the files are damaged.
    """
    places, twins = places_by_key(metadata), {alias: keys.tensors[key] for alias, key in keys.twins.items()}
    parts = {**keys.tensors, **twins}
    for key, tensor in parts.items():
        found = metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{what} is of another model: {key} is not a tensor in it; {BUILD}")
        if found.size != tensor.shape or found.properties.dtype != tensor.dtype:
            raise ValueError(
                f"{what} is of another model: {key} has shape {tuple(found.size)} and dtype {found.properties.dtype} "
                f"in it, shape {tuple(tensor.shape)} and dtype {tensor.dtype} here; {BUILD}"
            )
    apart = {alias: key for alias, key in keys.twins.items() if places.get(alias) != places.get(key)}
    values = read_entries(folder, metadata, [*keys.tensors, *apart, *keys.states], parts)
    for alias, key in apart.items():  # another tool wrote it twice, or they were not tied
        if not torch.equal(values[key].view(-1).view(torch.uint8), values[alias].view(-1).view(torch.uint8)):
            one, other = (name.removeprefix(keys.prefix) for name in (key, alias))
            raise ValueError(
                f"{what} is of another model: {one!r} and {other!r} are tied here, and differ in it; {BUILD}"
            )
    pairs = [(local(tensor.detach()), values[key]) for key, tensor in keys.tensors.items()]
    return pairs, {name: values[key] for key, name in keys.states.items()}


def _require_as_many_ranks(here: int, stored: Mapping[str, Any]) -> None:
    """Raise if ranks saved values of their own, and another number of ranks loads them."""
    split = [split_rank_prefix(key) or (0, "") for key in stored]
    ranks = {rank for rank, rest in split if rest.startswith((f"{MODEL}.", f"{OPTIM}."))}
    if ranks and ranks != set(range(here)):
        raise ValueError(
            f"cannot load on {here} ranks: the checkpoint has values of ignored parameters from each of {len(ranks)} "
            f"ranks; load it on {len(ranks)} ranks"
        )

"""Writes files of ``torch.distributed.checkpoint`` (DCP), and computes their SHA-256.

::

    __0_0.distcp    rank 0's items, one after the other: "model.embed.weight" rows 0-3, "optim.state...", bytes
    __1_0.distcp    rank 1's items: "model.embed.weight" rows 4-6, ...
    .metadata       the shape, dtype and chunks of each key; the file, start and length of each chunk

DCP's planner splits DTensors, and checks that ranks wrote all rows. Any reader of DCP's format can read the files.
DCP's writer is not used, since it computes no hash. Each rank plans its own items without communication, then sends one
message to rank 0.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from thunder_zero.checkpoint.folder import explain_write_error
from thunder_zero.checkpoint.manifest import File
from thunder_zero.compat.private import StorageInfo

KeyPath = tuple[str | int, ...]  # into the nested state dict, such as ("model", "embed.weight")
# The values that a rank writes, by path: a tensor, a DTensor (it writes its local part) or a pickled value. An alias of
# a tied weight has the path of the value, which is written once. All ranks have equal aliases.
Entries = dict[KeyPath, Tensor | bytes | KeyPath]


@dataclass(frozen=True, slots=True)
class Part:
    plan: SavePlan
    places: Mapping[MetadataIndex, StorageInfo]  # the files and byte ranges of items
    aliases: Mapping[str, str]  # from an alias's key to the key of the value
    files: tuple[File, ...]


class HashedFile(io.BufferedWriter):
    """A new file that hashes bytes before writing them, so that a later check detects a faulty disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return super().write(data)

    def seal(self, path: Path) -> File:
        self.flush()
        os.fsync(self.fileno())
        return File(path.name, self.tell(), self._digest.hexdigest())


class WritePlanner(DefaultSavePlanner):
    """DCP's planner, adapted to entries that are pickled values or aliases."""

    def __init__(self, entries: Entries) -> None:
        super().__init__()
        self.mappings = {key_of(path): path for path in entries}
        self.state_dict = {key_of(path): value for path, value in entries.items() if not isinstance(value, tuple)}
        self.aliases = {key_of(path): key_of(value) for path, value in entries.items() if isinstance(value, tuple)}
        self.is_coordinator = False

    def create_local_plan(self) -> SavePlan:
        def is_empty(item: WriteItem) -> bool:
            data = item.tensor_data
            return data is not None and data.size.numel() > 0 and data.chunk.sizes.numel() == 0

        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if not is_empty(item)])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return object


def key_of(path: KeyPath) -> str:
    return ".".join(map(str, path))


def write_planned(folder: Path, rank: int, planner: WritePlanner) -> Part:
    plan, places, path = planner.create_local_plan(), dict[MetadataIndex, StorageInfo](), folder / f"__{rank}_0.distcp"
    if not plan.items:
        return Part(plan, places, planner.aliases, ())
    with explain_write_error(path.name), HashedFile(path) as stream:
        for item in plan.items:
            value, start = planner.resolve_data(item), stream.tell()
            if isinstance(value, Tensor):
                value = value.detach().cpu()
                is_view = value.untyped_storage().nbytes() != value.nbytes  # torch would save the whole storage
                torch.save(value.clone() if is_view else value, stream)
            else:
                stream.write(value)
            places[item.index] = StorageInfo(path.name, start, stream.tell() - start)
        return Part(plan, places, planner.aliases, (stream.seal(path),))


def write_metadata(folder: Path, parts: Sequence[Part]) -> tuple[File, ...]:
    """Write DCP's metadata of all ranks' parts, and return all files. DCP raises if an element is missing."""
    _, metadata = DefaultSavePlanner().create_global_plan([part.plan for part in parts])
    places = {index: place for part in parts for index, place in part.places.items()}
    for alias, key in {alias: key for part in parts for alias, key in part.aliases.items()}.items():
        metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
        places |= {replace(index, fqn=alias): place for index, place in places.items() if index.fqn == key}
    metadata.storage_data, path = places, folder / ".metadata"
    with explain_write_error(path.name), HashedFile(path) as stream:
        pickle.dump(metadata, stream)
        return (*(file for part in parts for file in part.files), stream.seal(path))

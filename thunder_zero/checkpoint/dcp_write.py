"""Writes items to files of ``torch.distributed.checkpoint`` (DCP).

Any reader of DCP's format (FSDP2's tools, ``dcp_to_torch_save``) reads them. We use DCP's parts and not ``dcp.save``:
each rank's file follows from the plan, so this needs no process group, and one message from each rank is enough.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from thunder_zero.checkpoint.folder import explain_write_error
from thunder_zero.checkpoint.hashed_file import HashedFile
from thunder_zero.checkpoint.item import Item, KeyPath, ValueOf, key_of
from thunder_zero.checkpoint.manifest import File


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a checkpoint: DCP's items, where they were written, their paths by key, and the files."""

    items: Sequence[WriteItem]
    results: Sequence[WriteResult]
    paths: dict[str, KeyPath]
    files: tuple[File, ...]


class HashedFiles(FileSystem):
    """DCP's file system; hashes each file and remembers it by name."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Create a file to write."""
        name = Path(path).name
        with explain_write_error(name), Path(path).open("xb") as stream:
            hashed = HashedFile(stream)
            yield hashed
            self.written[name] = hashed.seal(name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        file = self.written.pop(Path(path).name)
        self.written[Path(new_path).name] = replace(file, name=Path(new_path).name)


class Writer(FileSystemWriter):
    """DCP's writer, on hashed files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # HashedFile.seal does
        self.fs = self.files = HashedFiles()

    def storage_meta(self) -> StorageMeta | None:
        """None: it would name the folder, which is renamed later."""
        return None


class WritePlanner(DefaultSavePlanner):
    """Gives the writer the value of each item."""

    def __init__(self, items: Sequence[Item], value_of: ValueOf) -> None:
        super().__init__()
        self._items = {_write_item(item, item.path).index: item for item in items}
        self._value_of = value_of

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor or the bytes to write."""
        value = self._value_of(self._items[write_item.index])
        return value if isinstance(value, Tensor) else io.BytesIO(value)


def write_items(folder: Path, rank: int, items: Sequence[Item], value_of: ValueOf = attrgetter("value")) -> Part:
    """Write a rank's items to a file of its own, and flush it to disk.

    Args:
        folder: the checkpoint's.
        rank: part of the file's name.
        items: the items to write.
        value_of: called for an item right before it is written (default: the item's value), so that not all values
            need be in memory at once.

    Raises:
        OSError: the file cannot be written.
    """
    writer = Writer(folder)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(SavePlan([_write_item(item, item.path) for item in items]))
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]  # puts the rank into the file's name
    results = writer.write_data(plan, WritePlanner(items, value_of)).value() if items else []
    by_index = {result.index: result for result in results}
    all_items, all_results = list(plan.items), list(results)
    paths = {item.key: item.path for item in items}
    for item in items:
        found = by_index[_write_item(item, item.path).index]
        for path in item.also:  # another name of the same bytes
            alias = _write_item(item, path)
            all_items.append(alias)
            all_results.append(replace(found, index=alias.index))
            paths[key_of(path)] = path
    return Part(all_items, all_results, paths, tuple(writer.files.written.values()))


def write_metadata(folder: Path, parts: Sequence[Part]) -> tuple[File, ...]:
    """Write DCP's metadata of all ranks' parts; returns all files of the checkpoint.

    Raises:
        OSError: the file cannot be written.
        ValueError: no rank wrote some rows of a tensor.
    """
    _, metadata = create_default_global_save_plan([SavePlan(list(part.items)) for part in parts])
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            _require_all_rows(key, stored)
    metadata.planner_data = {key: path for part in parts for key, path in part.paths.items()}
    writer = Writer(folder)
    writer.finish(metadata, [list(part.results) for part in parts])
    return (*(file for part in parts for file in part.files), *writer.files.written.values())


def chunk_of(item: Item) -> ChunkStorageMetadata:
    """An item's rows, as DCP describes a part of a tensor."""
    assert isinstance(item.value, Tensor), "values have no rows"
    offsets = [0] * item.value.ndim
    if offsets:
        offsets[0] = item.start
    return ChunkStorageMetadata(torch.Size(offsets), item.value.shape)


def _require_all_rows(key: str, stored: TensorStorageMetadata) -> None:
    written, needed = sum(chunk.sizes.numel() for chunk in stored.chunks), stored.size.numel()
    if written != needed:
        raise ValueError(
            f"{key} is incomplete: its shape {tuple(stored.size)} needs {needed} elements, the ranks wrote {written}"
        )


def _write_item(item: Item, path: KeyPath) -> WriteItem:
    key = key_of(path)
    if not isinstance(item.value, Tensor):
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    chunk = chunk_of(item)
    properties = TensorProperties(dtype=item.value.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(item.shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

"""Writes files of ``torch.distributed.checkpoint`` (DCP), each with its SHA-256.

DCP's planner cuts DTensors and its writer writes; any reader of its format reads them. ``dcp.save`` is not called: who
writes what follows from the model, so this needs no process group, and one message from each rank is enough.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from thunder_zero.checkpoint.folder import explain_write_error
from thunder_zero.checkpoint.hashed_file import HashedFile
from thunder_zero.checkpoint.manifest import File

KeyPath = tuple[str | int, ...]  # into the nested state dict, such as ("model", "embed.weight")


@dataclass(frozen=True, slots=True)
class Entries:
    """What a rank writes.

    Attributes:
        values: by path: tensors, DTensors, of which this rank writes its part, and pickled values.
        aliases: further paths of values (tied weights), which are written once; the same on every rank.
    """

    values: Mapping[KeyPath, Tensor | bytes]
    aliases: Mapping[KeyPath, KeyPath]

    def __or__(self, other: Entries) -> Entries:
        """Those of both."""
        return Entries({**self.values, **other.values}, {**self.aliases, **other.aliases})

    def on_cpu(self) -> Entries:
        """Copies, which training does not change."""
        values = self.values.items()
        copies = {path: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for path, value in values}
        return replace(self, values=copies)

    @property
    def paths(self) -> dict[str, KeyPath]:
        """The paths of all values by their names in the files."""
        return {key_of(path): path for path in (*self.values, *self.aliases)}


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of a checkpoint: DCP's plan of it, where its items were written, their paths, and the files."""

    plan: SavePlan
    results: Sequence[WriteResult]
    paths: Mapping[str, KeyPath]
    aliases: Mapping[str, str]
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
    """DCP's planner, for values that are pickled already."""

    def __init__(self, values: Mapping[KeyPath, Tensor | bytes]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.set_up_planner({key_of(path): value for path, value in values.items()})

    def create_local_plan(self) -> SavePlan:
        """What this rank writes: parts without rows are left out."""
        plan = super().create_local_plan()
        return replace(plan, items=[item for item in plan.items if not _is_empty(item)])

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The tensor or the bytes to write."""
        return io.BytesIO(object) if write_item.type == WriteItemType.BYTE_IO else object


def key_of(path: KeyPath) -> str:
    """A path's name in the files, as DCP joins it."""
    return ".".join(map(str, path))


def write_entries(folder: Path, rank: int, entries: Entries) -> Part:
    """Write a rank's entries to a file of its own, and flush it to disk.

    Raises:
        OSError: the file cannot be written.
    """
    planner = WritePlanner(entries.values)
    aliases = {key_of(alias): key_of(path) for alias, path in entries.aliases.items()}
    return write_plan(folder, rank, planner.create_local_plan(), planner, entries.paths, aliases)


def write_plan(
    folder: Path,
    rank: int,
    plan: SavePlan,
    planner: SavePlanner,
    paths: Mapping[str, KeyPath],
    aliases: Mapping[str, str],
) -> Part:
    """Write what DCP's plan lists, with the values of its planner, as the file of this rank.

    Raises:
        OSError: the file cannot be written.
    """
    writer = Writer(folder)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, writer.prepare_local_plan(plan)])[rank]  # names the file
    results = writer.write_data(plan, planner).value() if plan.items else []
    return Part(plan, results, paths, aliases, tuple(writer.files.written.values()))


def write_metadata(folder: Path, parts: Sequence[Part]) -> tuple[File, ...]:
    """Write DCP's metadata of all ranks' parts; returns all files of the checkpoint.

    Raises:
        OSError: the file cannot be written.
        ValueError: no rank wrote some rows of a tensor.
    """
    _, metadata = create_default_global_save_plan([part.plan for part in parts])
    described = metadata.state_dict_metadata
    for key, stored in described.items():
        if isinstance(stored, TensorStorageMetadata):
            _require_all_rows(key, stored)
    results = [result for part in parts for result in part.results]
    for alias, key in {alias: key for part in parts for alias, key in part.aliases.items()}.items():
        described[alias] = described[key]
        named = [result for result in results if result.index.fqn == key]
        results += [replace(result, index=replace(result.index, fqn=alias)) for result in named]
    metadata.planner_data = {key: path for part in parts for key, path in part.paths.items()}
    writer = Writer(folder)
    writer.finish(metadata, [results])
    return (*(file for part in parts for file in part.files), *writer.files.written.values())


def _require_all_rows(key: str, stored: TensorStorageMetadata) -> None:
    written, needed = sum(chunk.sizes.numel() for chunk in stored.chunks), stored.size.numel()
    if written != needed:
        raise ValueError(
            f"{key} is incomplete: its shape {tuple(stored.size)} needs {needed} elements, the ranks wrote {written}"
        )


def _is_empty(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.size.numel() > 0 and data.chunk.sizes.numel() == 0

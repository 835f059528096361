"""Items of a checkpoint to files of ``torch.distributed.checkpoint`` (DCP) and back; without a process group.

The files are DCP's: any of its readers (FSDP2's tools, ``dcp_to_torch_save``) reads them, and what others wrote with it
is read here. DCP's own functions are not called but its parts: what a rank writes follows from the plan, so that one
message a rank is enough; loading needs none. Nothing is unpickled that could run code.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from thunder_zero.checkpoint.folder import telling
from thunder_zero.checkpoint.manifest import File, Stored

Path_ = tuple[str | int, ...]  # where something stands in the nested state dict


@dataclass(frozen=True, slots=True)
class Item:
    """Something that a checkpoint has: rows of a tensor, or a value.

    Attributes:
        path: where it stands in the nested state dict, such as ``("model", "embed.weight")``.
        value: the rows, without padding; or a pickled value.
        start: which is the first of the rows.
        shape: of the whole tensor.
        also: where else it stands (tied weights); it is written once.
    """

    path: Path_
    value: Tensor | bytes
    start: int = 0
    shape: tuple[int, ...] = ()
    also: tuple[Path_, ...] = ()

    @property
    def key(self) -> str:
        """Its name in the files."""
        return key_of(self.path)


ValueOf = Callable[[Item], Tensor | bytes]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank wrote: DCP's items and where they are, their paths by key, and the files."""

    items: Sequence[WriteItem]
    results: Sequence[WriteResult]
    paths: dict[str, Path_]
    files: tuple[File, ...]


def key_of(path: Path_) -> str:
    """A path's name in the files, as DCP joins it."""
    return ".".join(map(str, path))


def pickled(value: Any) -> bytes:
    """A value as ``torch.save`` writes it.

    Raises:
        ValueError: ``torch.load(weights_only=True)`` would not read it.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        raise ValueError(
            f"an object of type {type(value).__name__} cannot be saved so that torch.load(weights_only=True) "
            f"reads it; give numbers, strings, tensors, and dicts and lists of them"
        ) from error
    return stream.getvalue()


# Writing


class HashedFile:
    """A file that is hashed while it is written, so that a disk that keeps other bytes is found out."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Write all of it."""
        self._digest.update(data)
        return self._stream.write(data)

    def tell(self) -> int:
        """How many bytes were written."""
        return self._stream.tell()

    def flush(self) -> None:
        """Hand everything to the system."""
        self._stream.flush()

    def close(self) -> None:
        """Left to whoever opened it, since it is flushed to disk before."""

    def sealed(self, name: str) -> File:
        """Flush it to disk; what it is from now on."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return File(name, self._stream.tell(), self._digest.hexdigest())


class Files(FileSystem):
    """DCP's file system, which remembers what was written."""

    def __init__(self) -> None:
        self.written: dict[str, File] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A file to write."""
        name = Path(path).name
        with telling(name), Path(path).open("xb") as stream:
            hashed = HashedFile(stream)
            yield hashed
            self.written[name] = hashed.sealed(name)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written."""
        super().rename(path, new_path)
        file = self.written.pop(Path(path).name)
        self.written[Path(new_path).name] = replace(file, name=Path(new_path).name)


class Writer(FileSystemWriter):
    """DCP's writer on such files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # HashedFile does, after flushing
        self.fs = self.files = Files()

    def storage_meta(self) -> StorageMeta | None:
        """None: the folder is renamed, and should not name itself wrong."""
        return None


class Written(SavePlanner):
    """Finds what an item of a plan is."""

    def __init__(self, items: Sequence[Item], value_of: ValueOf) -> None:
        self._items = {_write_item(item, item.path).index: item for item in items}
        self._value_of = value_of

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """The tensor or the bytes."""
        value = self._value_of(self._items[write_item.index])
        return value if isinstance(value, Tensor) else io.BytesIO(value)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def create_local_plan(self) -> SavePlan:
        """Made before."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Not needed."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing to change."""
        return new_plan


def write(folder: Path, rank: int, items: Sequence[Item], value_of: ValueOf = attrgetter("value")) -> Part:
    """Write a rank's items to a file of its own, and flush it to disk.

    Args:
        folder: where to.
        rank: is in the file's name.
        items: what to write.
        value_of: gives an item's value when its turn comes (default: what it has), so that not all need be there.

    Raises:
        OSError: it cannot be written.
    """
    writer = Writer(folder)
    writer.set_up_storage_writer(is_coordinator=rank == 0)
    plan = writer.prepare_local_plan(SavePlan([_write_item(item, item.path) for item in items]))
    plan = writer.prepare_global_plan([*[SavePlan([])] * rank, plan])[rank]  # the rank's number is in the file's name
    results = writer.write_data(plan, Written(items, value_of)).value() if items else []
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


def finish(folder: Path, parts: Sequence[Part]) -> tuple[tuple[File, ...], tuple[Stored, ...]]:
    """Write DCP's metadata of all ranks' parts; all files of the checkpoint, and all tensors in them.

    Raises:
        OSError: it cannot be written.
        ValueError: rows that no rank has.
    """
    _, metadata = create_default_global_save_plan([SavePlan(list(part.items)) for part in parts])
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            _require_rows(key, stored)
    metadata.planner_data = {key: path for part in parts for key, path in part.paths.items()}
    writer = Writer(folder)
    writer.finish(metadata, [list(part.results) for part in parts])
    files = [file for part in parts for file in part.files] + list(writer.files.written.values())
    tensors = [
        Stored(key, tuple(stored.size), str(stored.properties.dtype).removeprefix("torch."))
        for key, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    ]
    return tuple(files), tuple(tensors)


def _require_rows(key: str, stored: TensorStorageMetadata) -> None:
    rows = sum(chunk.sizes.numel() for chunk in stored.chunks)
    if rows != stored.size.numel():
        raise ValueError(f"ranks gave {rows} elements of {key}, and its shape {tuple(stored.size)} has other rows, too")


def _write_item(item: Item, path: Path_) -> WriteItem:
    key = key_of(path)
    if not isinstance(item.value, Tensor):
        return WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
    chunk = _chunk(item)
    properties = TensorProperties(dtype=item.value.dtype)
    data = TensorWriteData(chunk, properties, torch.Size(item.shape))
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _chunk(item: Item) -> ChunkStorageMetadata:
    assert isinstance(item.value, Tensor), "values have no rows"
    offsets = [0] * item.value.ndim
    if offsets:
        offsets[0] = item.start
    return ChunkStorageMetadata(torch.Size(offsets), item.value.shape)


# Reading


class Unpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else: a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that metadata consists of.

        Raises:
            UnpicklingError: anything else.
        """
        described = module == "torch.distributed.checkpoint.metadata" and "." not in name
        plain = (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("collections", "OrderedDict"),
        }
        place = module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath")
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        found = super().find_class(module, name) if described or plain or place or dtype else None
        if found is None or (described and not isinstance(found, type)):
            raise pickle.UnpicklingError(f"the metadata names {module}.{name}, which does not belong in it")
        return found


class Reader(FileSystemReader):
    """DCP's reader, which runs no code of the file's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is in the files.

        Raises:
            ValueError: it is damaged, or something else.
        """
        try:
            with (Path(self.path) / ".metadata").open("rb") as stream:
                metadata = Unpickler(stream).load()
        except FileNotFoundError:
            raise ValueError(f"{self.path} has no .metadata, so it is no checkpoint") from None
        except Exception as error:
            raise ValueError(f"{self.path} cannot be read: .metadata is damaged ({error})") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{self.path} cannot be read: .metadata is damaged, it is no metadata")
        return metadata


class RowsToRead(LoadPlanner):
    """Knows where what is read goes to."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._tensors = {item.key: item.value for item in items if isinstance(item.value, Tensor)}
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The rows that are about to be read."""
        rows = self._tensors[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            rows = rows.narrow(dim, start, length)
        return rows

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there already."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def create_local_plan(self) -> LoadPlan:
        """Made before."""
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Not needed."""
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing to change."""
        return central_plan


def read_metadata(folder: Path) -> Metadata:
    """What is in a checkpoint. Raises as :meth:`Reader.read_metadata`."""
    return Reader(folder).read_metadata()


def places_of(metadata: Metadata) -> dict[str, Any]:
    """Where the bytes of each key lie: names of the same place are of one tensor."""
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
    return {key: tuple(sorted(found)) for key, found in places.items()}


def read(folder: Path, metadata: Metadata, items: Sequence[Item], values: Sequence[str] = ()) -> dict[str, Any]:
    """Fill the items' tensors, which have the dtypes and whole shapes of the file; returns the values of these keys.

    Raises:
        ValueError: the files lack rows, or are damaged.
    """
    reads = []
    for item in items:
        assert isinstance(item.value, Tensor), "values are asked for by their keys"
        stored = metadata.state_dict_metadata[item.key]
        assert isinstance(stored, TensorStorageMetadata), "it was found to be a tensor before"
        found = create_read_items_for_chunk_list(item.key, stored, [_chunk(item)])
        if sum(prod(part.lengths) for part in found) != item.value.numel():
            raise ValueError(f"{folder} lacks rows of {item.key}")
        reads += found
    nothing = torch.Size((0,))
    for key in values:
        index = MetadataIndex(key)
        reads.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
    reader, wanted = Reader(folder), RowsToRead(items)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(LoadPlan(reads), wanted).wait()
    except Exception as error:
        raise ValueError(f"{folder} cannot be read, it is damaged: {str(error).partition(chr(10))[0]}") from error
    return wanted.values

"""Reads files of ``torch.distributed.checkpoint`` (DCP), ours or another tool's.

Needs no process group, and unpickles nothing that could run code.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from thunder_zero.checkpoint.dcp_check import Unsound, path_inside, require_sound
from thunder_zero.checkpoint.manifest import USE_ANOTHER
from thunder_zero.runtime.dtensors import local


class MetadataUnpickler(pickle.Unpickler):
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
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in it")
        return found


class Reader(FileSystemReader):
    """DCP's reader, which runs no code from the file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """DCP's description of the files.

        Raises:
            ValueError: it is missing, damaged, or something else.
        """
        try:
            with (Path(self.path) / ".metadata").open("rb") as stream:
                metadata = MetadataUnpickler(stream).load()
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} is not a checkpoint: it has no .metadata; pass the folder that was saved"
            ) from None
        except Exception as error:
            raise ValueError(f"cannot read {self.path}: .metadata is damaged ({error}); {USE_ANOTHER}") from None
        if not isinstance(metadata, Metadata):
            raise ValueError(
                f"cannot read {self.path}: .metadata is damaged (it holds a {type(metadata).__name__}); {USE_ANOTHER}"
            )
        try:
            require_sound(metadata)
        except Unsound as error:
            raise ValueError(f"cannot read {self.path}: .metadata is damaged ({error}); {USE_ANOTHER}") from None
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember where each part is, and what it must be."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._parts = {
            MetadataIndex(key, chunk.offsets): (tuple(chunk.sizes), stored.properties.dtype)
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
            for chunk in stored.chunks
        }

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan; unlike DCP's, refuse a part of another shape or dtype than its metadata's.

        Raises:
            ValueError: a part is another tensor, or its file is not in the folder.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for read in plan.items:
            by_file.setdefault(self.storage_data[read.storage_index].relative_path, []).append(read)
        for name, reads in by_file.items():
            with path_inside(Path(self.path), name).open("rb") as stream:
                for read in reads:
                    self._read_one(read, stream, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_one(self, read: ReadItem, stream: IO[bytes], planner: LoadPlanner) -> None:
        place = self.storage_data[read.storage_index]
        part = self._slice_file(stream, place)
        content = self.transforms.transform_load_stream(read, place.transform_descriptors or (), part)
        if read.type == LoadItemType.BYTE_IO:
            planner.load_bytes(read, io.BytesIO(content.read(-1)))
            return
        seekable = content if content.seekable() else io.BytesIO(content.read(-1))
        value = torch.load(seekable, map_location="cpu", weights_only=True)
        shape, dtype = self._parts[read.storage_index]
        _require_part(read.storage_index.fqn, value, shape, dtype)
        planner.resolve_tensor(read).copy_(narrow_tensor_by_index(value, read.storage_offsets, read.lengths))


def _require_part(key: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if type(value) is not Tensor or value.layout is not torch.strided:
        raise ValueError(f"{key} is no plain tensor in its file")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"a part of {key} has shape {tuple(value.shape)} and dtype {value.dtype} in its file, {shape} and {dtype} "
            f"in .metadata"
        )


class ReadPlanner(DefaultLoadPlanner):
    """DCP's planner; reads into new memory on the CPU, and runs no code from the files.

    Attributes:
        values: what is read, by key; has memory for the tensors.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values = values

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value."""
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to fill."""
        found: Tensor = self.values[index.fqn]
        return found


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of a checkpoint. Raises as :meth:`Reader.read_metadata`."""
    return Reader(folder).read_metadata()


def places_by_key(metadata: Metadata) -> dict[str, Any]:
    """The places of each key's bytes in the files: keys with the same places are names of one tensor."""
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
    return {key: tuple(sorted(found)) for key, found in places.items()}


def read_entries(
    folder: Path, metadata: Metadata, keys: Iterable[str], parts: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Any]:
    """The values of these keys; tensors in new memory on the CPU, in the file's dtype.

    Args:
        folder: the checkpoint's.
        metadata: its description of its contents.
        keys: what to read.
        parts: DTensors by key, of the shapes in the files: of these keys this rank's part is read, of others all.

    Raises:
        ValueError: the files are damaged, or do not contain all rows.
    """
    stored = {key: metadata.state_dict_metadata[key] for key in keys}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, found in stored.items():
        if isinstance(found, TensorStorageMetadata):
            tensors[key] = parts[key] if key in parts else torch.empty(found.size, device="meta")
            values[key] = torch.empty(local(tensors[key]).shape, dtype=found.properties.dtype)
    planner = ReadPlanner(values)
    plan = create_default_local_load_plan({**stored, **tensors}, metadata)
    counts = Counter[str]()
    for read in plan.items:
        counts[read.dest_index.fqn] += prod(read.lengths)
    for key, value in planner.values.items():
        if counts[key] != value.numel():
            raise ValueError(f"{folder} is incomplete: rows of {key} are missing; {USE_ANOTHER}")
    reader = Reader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    try:
        reader.read_data(plan, planner).wait()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {folder}: a file is damaged ({reason}); {USE_ANOTHER}") from error
    return planner.values

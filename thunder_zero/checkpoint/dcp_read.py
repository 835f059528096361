"""Reads files of ``torch.distributed.checkpoint`` (DCP), ours or another tool's.

DCP's planner cuts. Its reader is not called: it unpickles what could run code, and casts a tensor of another dtype.
This needs no process group.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from thunder_zero.checkpoint.dcp_check import wrong_in_files, wrong_in_metadata
from thunder_zero.checkpoint.manifest import USE_ANOTHER
from thunder_zero.runtime.dtensors import local

DESCRIBES = "torch.distributed.checkpoint.metadata"  # its classes may be in metadata
OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else: a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that metadata consists of.

        Raises:
            UnpicklingError: anything else.
        """
        described = module == DESCRIBES and "." not in name
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        found = super().find_class(module, name) if described or dtype or (module, name) in OTHERS else None
        if found is None or (described and not isinstance(found, type)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in it")
        return found


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of a checkpoint, whose files have all that it says; reads none of them.

    Raises:
        ValueError: it is missing, damaged, or something else; a file is missing, too short, or outside of the folder.
    """
    try:
        with (folder / ".metadata").open("rb") as stream:
            metadata = MetadataUnpickler(stream).load()
        wrong = wrong_in_metadata(metadata)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a checkpoint: it has no .metadata; pass the folder that was saved") from None
    except Exception as error:
        wrong = str(error)
    if wrong is not None:
        raise ValueError(f"cannot read {folder}: .metadata is damaged ({wrong}); {USE_ANOTHER}")
    if (wrong := wrong_in_files(folder, metadata)) is not None:
        raise ValueError(f"{folder} is damaged: {wrong}; {USE_ANOTHER}")
    found: Metadata = metadata
    return found


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
    wanted: dict[str, Any] = {key: metadata.state_dict_metadata[key] for key in keys}
    values: dict[str, Any] = {}
    for key, stored in wanted.items():
        if isinstance(stored, TensorStorageMetadata):
            wanted[key] = parts[key] if key in parts else torch.empty(stored.size, device="meta")
            values[key] = torch.empty(local(wanted[key]).shape, dtype=stored.properties.dtype)
    plan = create_default_local_load_plan(wanted, metadata)
    by_file: dict[str, list[ReadItem]] = {}
    counts = Counter[str]()
    for read in plan.items:
        counts[read.dest_index.fqn] += prod(read.lengths)
        by_file.setdefault(metadata.storage_data[read.storage_index].relative_path, []).append(read)
    for key, value in values.items():
        if counts[key] != value.numel():
            raise ValueError(f"{folder} is incomplete: rows of {key} are missing; {USE_ANOTHER}")
    try:
        for name, reads in by_file.items():
            _read_file(folder / name, metadata, reads, values)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"cannot read {folder}: a file is damaged ({reason}); {USE_ANOTHER}") from error
    return values


def _read_file(path: Path, metadata: Metadata, reads: Iterable[ReadItem], values: dict[str, Any]) -> None:
    """Read the items of DCP's plan that are in one file."""
    reader = FileSystemReader(path.parent)
    with path.open("rb") as stream:
        for read in reads:
            place, key = metadata.storage_data[read.storage_index], read.dest_index.fqn
            raw = reader._slice_file(stream, place)
            content = reader.transforms.transform_load_stream(read, place.transform_descriptors or (), raw)
            seekable = content if content.seekable() else io.BytesIO(content.read(-1))
            value = torch.load(seekable, map_location="cpu", weights_only=True)
            if read.type == LoadItemType.BYTE_IO:
                values[key] = value
                continue
            _require_part(read.storage_index, value, metadata)
            part = narrow_tensor_by_index(value, read.storage_offsets, read.lengths)
            narrow_tensor_by_index(values[key], read.dest_offsets, read.lengths).copy_(part)


def _require_part(index: MetadataIndex, value: Any, metadata: Metadata) -> None:
    """Raise unless a part is the tensor that its metadata describes."""
    stored: Any = metadata.state_dict_metadata[index.fqn]
    shape = next(tuple(chunk.sizes) for chunk in stored.chunks if chunk.offsets == index.offset)
    dtype = stored.properties.dtype
    if type(value) is not Tensor or value.layout is not torch.strided:
        raise ValueError(f"{index.fqn} is no plain tensor in its file")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(
            f"a part of {index.fqn} has shape {tuple(value.shape)} and dtype {value.dtype} in its file, {shape} and "
            f"{dtype} in .metadata"
        )

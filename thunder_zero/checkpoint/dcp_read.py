"""Checks and reads files of ``torch.distributed.checkpoint`` (DCP), ours or another tool's.

Sound metadata describes each element of each tensor once, at places inside of the folder that are large enough. DCP's
planner cuts. Its reader is not called: it unpickles what could run code, and casts a tensor of another dtype. This
needs no process group.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from thunder_zero.checkpoint.manifest import USE_ANOTHER
from thunder_zero.compat.private import StorageInfo, narrow_tensor_by_index
from thunder_zero.compat.torch_gaps import slice_of_file
from thunder_zero.sharded.dtensors import local

DESCRIBES = "torch.distributed.checkpoint.metadata"  # its classes may be in metadata
OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # no plain tensors
Box = tuple[tuple[int, ...], tuple[int, ...]]  # of a chunk: its first element, and one after its last


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else: a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        """A class that metadata consists of; anything else is refused."""
        described = module == DESCRIBES and "." not in name
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        found = super().find_class(module, name) if described or dtype or (module, name) in OTHERS else None
        if found is None or (described and not isinstance(found, type)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in it")
        return found


def read_metadata(folder: Path) -> Metadata:
    """DCP's description of a checkpoint, whose files have all that it says; reads none of them."""
    try:
        with (folder / ".metadata").open("rb") as stream:
            metadata = MetadataUnpickler(stream).load()
        wrong = _wrong_in_metadata(metadata)
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a checkpoint: it has no .metadata; pass the folder that was saved") from None
    except Exception as error:
        wrong = str(error)
    if wrong is not None:
        raise ValueError(f"cannot read {folder}: .metadata is damaged ({wrong}); {USE_ANOTHER}")
    if (wrong := _wrong_in_files(folder, metadata)) is not None:
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
    """The values of these keys; tensors in new memory on the CPU, in the file's dtype. Of keys in ``parts``, which has
    DTensors of the shapes in the files, this rank's part is read, of others all."""
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
            raw = slice_of_file(reader, stream, place)
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


# What is wrong with metadata


def _wrong_in_metadata(metadata: Any) -> str | None:
    """What is wrong first, to complete "metadata is damaged"; reads no file."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    try:
        return next(_wrong(metadata.state_dict_metadata, metadata.storage_data), None)
    except Exception as error:  # a part of it lacks a field, is another object, or a number is too large
        return f"an entry has another type than DCP's: {error}"


def _wrong_in_files(folder: Path, metadata: Metadata) -> str | None:
    """What is wrong with the files that metadata names, which reads none of them."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"the file name {name!r} leads out of it"
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            return f"{name} {'is missing' if size is None else f'has {size:,} bytes'}, its .metadata needs {end:,}"
    return None


def _wrong(entries: Any, places: Any) -> Iterator[str]:
    """A sentence for each fault; what follows one expects that there is none."""
    if type(entries) is not dict or type(places) is not dict:
        yield "its list of entries, or of places in files, is not a dict"
    for key, stored in entries.items():
        if type(key) is not str:
            yield f"it has an entry that is named {key!r}"
        if isinstance(stored, TensorStorageMetadata):
            yield from _wrong_tensor(key, stored, places)
        elif not isinstance(stored, BytesStorageMetadata):
            yield f"{key} is a {type(stored).__name__}"
        elif MetadataIndex(key) not in places:
            yield f"{key} is in no file"
    ranges: dict[str, set[tuple[int, int]]] = {}
    for index, place in places.items():
        if not isinstance(index, MetadataIndex) or type(index.fqn) is not str or not _are_counts(index.offset or ()):
            yield f"{index!r} is not the name of an entry"
        if not isinstance(place, StorageInfo):
            yield f"the place of {index.fqn} is a {type(place).__name__}"
        name, start, length = place.relative_path, place.offset, place.length
        if type(name) is not str or "\0" in name or not _are_counts([start, length]):
            yield f"{index.fqn} is at {start!r}, {length!r} in {name!r}"
        if length:
            ranges.setdefault(name, set()).add((start, start + length))
    for name, of_file in ranges.items():  # those of tied weights are the same
        for (_, end), (start, _) in pairwise(sorted(of_file)):
            if end > start:
                yield f"entries overlap in {name} at byte {start:,}"


def _wrong_tensor(key: str, stored: Any, places: Mapping[MetadataIndex, Any]) -> Iterator[str]:
    size, dtype = stored.size, stored.properties.dtype
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        yield f"the dtype of {key} is {dtype!r}"
    if not _are_counts(size):
        yield f"the shape of {key} is {size!r}"
    boxes: list[Box] = []
    for chunk in stored.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            yield f"a part of {key} is a {type(chunk).__name__}"
        at, sizes = chunk.offsets, chunk.sizes
        if not _are_counts(at) or not _are_counts(sizes) or not len(at) == len(sizes) == len(size):
            yield f"a part of {key} has another rank"
        box = tuple(at), tuple(start + more for start, more in zip(at, sizes, strict=True))
        if prod(sizes):
            boxes.append(box)
            if any(end > whole for end, whole in zip(box[1], size, strict=True)):
                yield f"a part of {key} at {box[0]} is outside of its shape {tuple(size)}"
    if _overlap(boxes):
        yield f"parts of {key} overlap"
    for start, stop in boxes:
        place = places.get(MetadataIndex(key, start))
        nbytes = prod(end - at for at, end in zip(start, stop, strict=True)) * dtype.itemsize
        if place is None:
            yield f"the part of {key} at {start} is in no file"
        elif not place.transform_descriptors and place.length < nbytes:  # not compressed
            yield f"{key} has {nbytes:,} bytes, its place {place.length:,}"


def _are_counts(values: Any) -> bool:
    return isinstance(values, Sequence) and all(type(value) is int and value >= 0 for value in values)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two boxes overlap; compares neighbours along the dimension that is cut most often."""
    dimensions = range(len(boxes[0][0]) if boxes else 0)
    if len(boxes) < 2 or not dimensions:
        return len(boxes) > 1
    most = max(dimensions, key=lambda dimension: len({start[dimension] for start, _ in boxes}))
    active: list[Box] = []
    for start, end in sorted(boxes, key=lambda box: box[0][most]):
        active = [box for box in active if box[1][most] > start[most]]
        if any(all(start[at] < stop[at] and first[at] < end[at] for at in dimensions) for first, stop in active):
            return True
        active.append((start, end))
    return False

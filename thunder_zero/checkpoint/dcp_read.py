"""Checks and reads files of ``torch.distributed.checkpoint`` (DCP), ours or another tool's.

Sound metadata describes each element of each tensor once, at places inside of the folder that are large enough. A file
is read once, from its start to its end, and hashed on the way::

    __0_0.distcp    | model.embed.weight | optim.state... | param_groups |     -> SHA-256 of all of it
                       decoded              not needed       decoded

DCP's planner cuts. Its reader is not called: it unpickles what could run code, casts a tensor of another dtype, and
jumps in the file. No process group is needed.
"""

from __future__ import annotations

import hashlib
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

from thunder_zero.checkpoint.manifest import USE_ANOTHER, File, ForwardReader, fault_of, raise_faults
from thunder_zero.compat.private import StorageInfo, narrow_tensor_by_index
from thunder_zero.sharded.dtensors import local

METADATA = ".metadata"
DESCRIBES = "torch.distributed.checkpoint.metadata"  # its classes may be in metadata
OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # no plain tensors
Box = tuple[tuple[int, ...], tuple[int, ...]]  # the first element of a chunk, and one after its last


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata and nothing else: a pickle may name any function to call."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata consists of. Raises UnpicklingError for any other."""
        described = module == DESCRIBES and "." not in name
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        kind = super().find_class(module, name) if described or dtype or (module, name) in OTHERS else None
        if kind is None or (described and not isinstance(kind, type)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in it")
        return kind


def read_metadata(folder: Path, expected: File | None = None) -> Metadata:
    """Read DCP's description of a checkpoint.

    Other files are not read, but their sizes are checked.

    Args:
        expected: the manifest's entry of the metadata, to compare its SHA-256 with.

    Raises:
        ValueError: there is no metadata, it is damaged, or a file that it names is too short.
    """
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a checkpoint: it has no .metadata; pass the folder that was saved") from None
    if expected is not None and (fault := fault_of(expected, hashlib.sha256(content).hexdigest())):
        raise_faults(folder, [fault])
    try:
        metadata: Metadata = MetadataUnpickler(io.BytesIO(content)).load()
        wrong = _wrong_in_metadata(metadata)
    except Exception as error:
        wrong = str(error)
    if wrong is not None:
        raise ValueError(f"cannot read {folder}: .metadata is damaged ({wrong}); {USE_ANOTHER}")
    if (wrong := _wrong_in_files(folder, metadata)) is not None:
        raise_faults(folder, [wrong])
    return metadata


def places_by_key(metadata: Metadata) -> dict[str, Any]:
    """Return where each key's bytes are in the files. Keys with equal places are names of one tensor."""
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
    return {key: tuple(sorted(of_key)) for key, of_key in places.items()}


def read_entries(
    folder: Path,
    metadata: Metadata,
    keys: Iterable[str],
    parts: Mapping[str, Tensor] = MappingProxyType({}),
    files: Sequence[File] = (),
) -> dict[str, Any]:
    """Read the values of keys; tensors are in new memory on the CPU, in the file's dtype.

    Each file is read once at most.

    Args:
        parts: DTensors by key, of the shapes in the files: only this rank's part is read.
        files: files to read in full and compare with their SHA-256, whether they have a value of these keys or not.

    Raises:
        ValueError: rows are missing; a file was changed, or a value in it is not what the metadata says.
    """
    values, plan = _planned(metadata, keys, parts)
    by_file: dict[str, list[ReadItem]] = {file.name: [] for file in files}
    counts = Counter[str]()
    for item in plan:
        counts[item.dest_index.fqn] += prod(item.lengths)
        by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for key, value in values.items():
        if counts[key] != value.numel():
            raise ValueError(f"{folder} is incomplete: rows of {key} are missing; {USE_ANOTHER}")
    expected = {file.name: file for file in files}
    faults, failures = list[str](), list[Exception]()
    for name, items in by_file.items():
        try:
            fault, failure = _read_file(folder / name, metadata, items, values, expected.get(name))
        except Exception as error:
            fault, failure = "", error
        faults += [fault] if fault else []
        failures += [] if failure is None else [failure]
    raise_faults(folder, faults)  # first, since what cannot be decoded was probably changed
    for failure in failures:
        reason = str(failure).partition("\n")[0]
        raise ValueError(f"cannot read {folder}: a file is damaged ({reason}); {USE_ANOTHER}") from failure
    return values


def _planned(
    metadata: Metadata, keys: Iterable[str], parts: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[ReadItem]]:
    """Return new memory for the tensors among the keys, and what to read, as DCP's planner cuts it."""
    wanted: dict[str, Any] = {key: metadata.state_dict_metadata[key] for key in keys}
    values: dict[str, Any] = {}
    for key, stored in wanted.items():
        if isinstance(stored, TensorStorageMetadata):
            wanted[key] = parts[key] if key in parts else torch.empty(stored.size, device="meta")
            values[key] = torch.empty(local(wanted[key]).shape, dtype=stored.properties.dtype)
    return values, create_default_local_load_plan(wanted, metadata).items


def _read_file(
    path: Path, metadata: Metadata, items: Iterable[ReadItem], values: dict[str, Any], expected: File | None
) -> tuple[str, Exception | None]:
    """Read items of one file, once; hash all of it if a SHA-256 is expected.

    Returns:
        The fault of the file, empty if there is none, and the first error of decoding its items.
    """
    by_range: dict[tuple[int, int], list[ReadItem]] = {}
    for item in items:
        place = metadata.storage_data[item.storage_index]
        by_range.setdefault((place.offset, place.length), []).append(item)
    failure = None
    with path.open("rb", buffering=0) as stream:
        file = ForwardReader(stream, hashed=expected is not None)
        for start, length in sorted(by_range):
            data = file.read(start, length)
            try:
                for item in by_range[start, length]:
                    _decode(data, item, metadata, values)
            except Exception as error:
                failure = failure or error  # the rest is hashed all the same
        return "" if expected is None else fault_of(expected, file.sha256()), failure


def _decode(data: bytes, item: ReadItem, metadata: Metadata, values: dict[str, Any]) -> None:
    """Decode the bytes of an item, and put what this rank needs of it into ``values``."""
    key, transforms = item.dest_index.fqn, metadata.storage_data[item.storage_index].transform_descriptors or ()
    stream = io.BytesIO(data)
    if transforms:  # such as compression
        decoded = FileSystemReader("").transforms.transform_load_stream(item, transforms, stream)
        stream = io.BytesIO(decoded.read(-1))
    value = torch.load(stream, map_location="cpu", weights_only=True)
    if item.type == LoadItemType.BYTE_IO:
        values[key] = value
        return
    _require_part(item.storage_index, value, metadata)
    part = narrow_tensor_by_index(value, item.storage_offsets, item.lengths)
    narrow_tensor_by_index(values[key], item.dest_offsets, item.lengths).copy_(part)


def _require_part(index: MetadataIndex, value: Any, metadata: Metadata) -> None:
    """Raise ValueError unless a part is the tensor that its metadata describes."""
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
    """Describe the first fault of metadata, to complete "metadata is damaged"; None if there is none."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    try:
        return next(_wrong(metadata.state_dict_metadata, metadata.storage_data), None)
    except Exception as error:  # a part of it lacks a field, is another object, or a number is too large
        return f"an entry has another type than DCP's: {error}"


def _wrong_in_files(folder: Path, metadata: Metadata) -> str | None:
    """Describe the first file that is missing or too short for its metadata; None if there is none."""
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
    """Yield a sentence for each fault. The code after a ``yield`` may fail if that fault was found."""
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
    for name, in_file in ranges.items():  # a set, since tied weights have equal ranges
        for (_, end), (start, _) in pairwise(sorted(in_file)):
            if end > start:
                yield f"entries overlap in {name} at byte {start:,}"


def _wrong_tensor(key: str, stored: Any, places: Mapping[MetadataIndex, Any]) -> Iterator[str]:
    """Yield a sentence for each fault of a tensor's metadata."""
    size, dtype = stored.size, stored.properties.dtype
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        yield f"the dtype of {key} is {dtype!r}"
    if not _are_counts(size):
        yield f"the shape of {key} is {size!r}"
    boxes: list[Box] = []
    for chunk in stored.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            yield f"a part of {key} is a {type(chunk).__name__}"
        first, sizes = chunk.offsets, chunk.sizes
        if not _are_counts(first) or not _are_counts(sizes) or not len(first) == len(sizes) == len(size):
            yield f"a part of {key} has another rank"
        box = tuple(first), tuple(start + length for start, length in zip(first, sizes, strict=True))
        if prod(sizes):
            boxes.append(box)
            if any(end > whole for end, whole in zip(box[1], size, strict=True)):
                yield f"a part of {key} at {box[0]} is outside of its shape {tuple(size)}"
    if _overlap(boxes):
        yield f"parts of {key} overlap"
    for start, end in boxes:
        place = places.get(MetadataIndex(key, start))
        nbytes = prod(stop - begin for begin, stop in zip(start, end, strict=True)) * dtype.itemsize
        if place is None:
            yield f"the part of {key} at {start} is in no file"
        elif not place.transform_descriptors and place.length < nbytes:  # not compressed
            yield f"{key} has {nbytes:,} bytes, its place {place.length:,}"


def _are_counts(values: Any) -> bool:
    return isinstance(values, Sequence) and all(type(value) is int and value >= 0 for value in values)


def _overlap(boxes: Sequence[Box]) -> bool:
    """Return whether two boxes overlap; compares neighbours along the dimension that is cut most often."""
    dimensions = range(len(boxes[0][0]) if boxes else 0)
    if len(boxes) < 2 or not dimensions:
        return len(boxes) > 1
    most = max(dimensions, key=lambda dimension: len({start[dimension] for start, _ in boxes}))
    active: list[Box] = []
    for start, end in sorted(boxes, key=lambda box: box[0][most]):
        active = [box for box in active if box[1][most] > start[most]]
        if any(all(start[dim] < stop[dim] and first[dim] < end[dim] for dim in dimensions) for first, stop in active):
            return True
        active.append((start, end))
    return False

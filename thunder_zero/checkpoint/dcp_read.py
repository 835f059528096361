"""Checks and reads files of ``torch.distributed.checkpoint`` (DCP) from ``tz.save`` or other tools.

Valid metadata describes each element of each tensor once, and its byte ranges lie inside files of the folder. A file is
read once, from start to end, and hashed during the read::

    __0_0.distcp    | model.embed.weight | optim.state... | param_groups |     -> SHA-256 of the whole file
                       decoded              not needed       decoded

DCP's planner decides which byte ranges to read. DCP's reader is not used, since it may run arbitrary code, casts
tensors of other dtypes, and seeks in the file.
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
METADATA_MODULE = "torch.distributed.checkpoint.metadata"  # metadata may contain all of its classes
ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    *((module, f"{system}Path") for module in ("pathlib", "pathlib._local") for system in ("Posix", "Windows")),
}
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # not supported
Box = tuple[tuple[int, ...], tuple[int, ...]]  # the start of a chunk's indices, and their exclusive end


class MetadataUnpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of DCP's metadata, since a pickle could call any function."""

    def find_class(self, module: str, name: str) -> Any:
        is_in_metadata_module = module == METADATA_MODULE and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_allowed = is_in_metadata_module or is_dtype or (module, name) in ALLOWED
        kind = super().find_class(module, name) if is_allowed else None
        if kind is None or (is_in_metadata_module and not isinstance(kind, type)):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong in it")
        return kind


def read_metadata(folder: Path, expected: File | None = None) -> Metadata:
    """Read DCP's metadata of a checkpoint, and compare it with its entry in the manifest. Check the sizes of the other
    files, without reading them."""
    try:
        content = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{folder} is not a checkpoint: it has no .metadata; pass the folder that was saved") from None
    if expected is not None and (fault := fault_of(expected, hashlib.sha256(content).hexdigest())):
        raise_faults(folder, [fault])
    try:
        metadata: Metadata = MetadataUnpickler(io.BytesIO(content)).load()
        problem = _problem_of_metadata(metadata)
    except Exception as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(f"cannot read {folder}: .metadata is damaged ({problem}); {USE_ANOTHER}")
    if (problem := _problem_of_files(folder, metadata)) is not None:
        raise_faults(folder, [problem])
    return metadata


def places_by_key(metadata: Metadata) -> dict[str, Any]:
    """Return the files and offsets of each key's bytes. Two keys with equal files and offsets name one tensor."""
    places: dict[str, list[Any]] = {}
    for index, info in (metadata.storage_data or {}).items():
        places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
    return {key: tuple(sorted(places_of_key)) for key, places_of_key in places.items()}


def read_entries(
    folder: Path,
    metadata: Metadata,
    keys: Iterable[str],
    parts: Mapping[str, Tensor] = MappingProxyType({}),
    files: Sequence[File] = (),
) -> dict[str, Any]:
    """Read the values of keys into new memory on the CPU, in the file's dtype. Each file is read at most once.

    For the keys of ``parts``, DTensors, only this rank's part is read. ``files`` are read in full, and compared with
    their SHA-256.
    """
    values, plan = _plan_reads(metadata, keys, parts)
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
    raise_faults(folder, faults)  # raise faults first, since they probably caused the failure to decode
    for failure in failures:
        reason = str(failure).partition("\n")[0]
        raise ValueError(f"cannot read {folder}: a file is damaged ({reason}); {USE_ANOTHER}") from failure
    return values


def _plan_reads(
    metadata: Metadata, keys: Iterable[str], parts: Mapping[str, Tensor]
) -> tuple[dict[str, Any], list[ReadItem]]:
    """Allocate memory for the keys whose values are tensors. Return the memory, and DCP's plan of the items to read."""
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
    """Read the items of one file in one pass. Return the fault of its SHA-256, and the first error of decoding."""
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
                failure = failure or error  # go on, so that the whole file is hashed
        return "" if expected is None else fault_of(expected, file.sha256()), failure


def _decode(data: bytes, item: ReadItem, metadata: Metadata, values: dict[str, Any]) -> None:
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


# Validation of metadata


def _problem_of_metadata(metadata: Any) -> str | None:
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    try:
        return next(_problems(metadata.state_dict_metadata, metadata.storage_data), None)
    except Exception as error:  # an entry lacks a field or has another type, or a number is too large
        return f"an entry has another type than DCP's: {error}"


def _problem_of_files(folder: Path, metadata: Metadata) -> str | None:
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


def _problems(entries: Any, places: Any) -> Iterator[str]:
    """Yield a sentence for each problem. Code after a ``yield`` may fail, so only the first problem is reliable."""
    if type(entries) is not dict or type(places) is not dict:
        yield "its list of entries, or of places in files, is not a dict"
    for key, stored in entries.items():
        if type(key) is not str:
            yield f"it has an entry that is named {key!r}"
        if isinstance(stored, TensorStorageMetadata):
            yield from _problems_of_tensor(key, stored, places)
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
    for name, ranges_of_file in ranges.items():  # a set, since tied weights have equal ranges
        for (_, end), (start, _) in pairwise(sorted(ranges_of_file)):
            if end > start:
                yield f"entries overlap in {name} at byte {start:,}"


def _problems_of_tensor(key: str, stored: Any, places: Mapping[MetadataIndex, Any]) -> Iterator[str]:
    size, dtype = stored.size, stored.properties.dtype
    if not isinstance(dtype, torch.dtype) or dtype in QUANTIZED:
        yield f"the dtype of {key} is {dtype!r}"
    if not _are_counts(size):
        yield f"the shape of {key} is {size!r}"
    boxes: list[Box] = []
    for chunk in stored.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            yield f"a part of {key} is a {type(chunk).__name__}"
        starts, sizes = chunk.offsets, chunk.sizes
        if not _are_counts(starts) or not _are_counts(sizes) or not len(starts) == len(sizes) == len(size):
            yield f"a part of {key} has another rank"
        box = tuple(starts), tuple(start + length for start, length in zip(starts, sizes, strict=True))
        if prod(sizes):
            boxes.append(box)
            if any(end > limit for end, limit in zip(box[1], size, strict=True)):
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
    """Return whether any two boxes overlap. Sweep along the dimension with the most distinct starts."""
    dimensions = range(len(boxes[0][0]) if boxes else 0)
    if len(boxes) < 2 or not dimensions:
        return len(boxes) > 1
    swept = max(dimensions, key=lambda dimension: len({start[dimension] for start, _ in boxes}))
    active: list[Box] = []
    for start, end in sorted(boxes, key=lambda box: box[0][swept]):
        active = [box for box in active if box[1][swept] > start[swept]]
        if any(all(start[dim] < stop[dim] and begin[dim] < end[dim] for dim in dimensions) for begin, stop in active):
            return True
        active.append((start, end))
    return False

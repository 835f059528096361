"""Checks DCP's metadata before anything is read: types, shapes, parts, places in the files.

Metadata that passes describes each element of each tensor once, at places inside of the folder that are large enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}  # no plain tensors
Box = tuple[tuple[int, ...], tuple[int, ...]]  # of a chunk: its first element, and one after its last


def wrong_in_metadata(metadata: Any) -> str | None:
    """What is wrong first, to complete "metadata is damaged"; reads no file."""
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    try:
        return next(_wrong(metadata.state_dict_metadata, metadata.storage_data), None)
    except Exception as error:  # a part of it lacks a field, is another object, or a number is too large
        return f"an entry has another type than DCP's: {error}"


def wrong_in_files(folder: Path, metadata: Metadata) -> str | None:
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
        if not isinstance(place, _StorageInfo):
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

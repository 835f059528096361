"""Checks DCP's metadata before anything is read: types, shapes, parts, places in the files.

Metadata that passes describes each element of each tensor once, at places inside of the folder that are large enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path, PurePath
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


class Unsound(ValueError):
    """Metadata contradicts itself; the message completes "cannot read ...: .metadata is damaged"."""


def require_sound(metadata: Metadata) -> None:
    """Raise unless metadata has the right types and describes each tensor once; reads no file.

    Raises:
        Unsound: naming the first entry that is wrong.
    """
    try:
        _require(type(metadata.state_dict_metadata) is dict, "its list of entries is not a dict")
        _require(type(metadata.storage_data) is dict, "its list of places in files is not a dict")
        for key, stored in metadata.state_dict_metadata.items():
            _require(type(key) is str, f"it has an entry that is named {key!r}")
            if not isinstance(stored, BytesStorageMetadata):
                _require_tensor(key, stored)
        for index, place in metadata.storage_data.items():
            _require_place(index, place)
        _require_places(metadata.state_dict_metadata, metadata.storage_data)
        _require_apart(metadata.storage_data)
    except Unsound:
        raise
    except Exception as error:  # a part of it lacks a field, is another object, or a number is too large
        raise Unsound(f"an entry has another type than DCP's: {error}") from None


def require_files(folder: Path, metadata: Metadata) -> None:
    """Raise unless the files are inside of the folder, and as long as their metadata says; reads none of them.

    Raises:
        ValueError: a file is missing, too short, or elsewhere.
    """
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        path = path_inside(folder, name)
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ValueError(
                f"{folder} is damaged: {name} {found}, its .metadata needs {end:,}; use another checkpoint"
            )


def path_inside(folder: Path, name: str) -> Path:
    """A file of a checkpoint.

    Raises:
        ValueError: the name, or a link, leads out of the folder.
    """
    path = folder / name
    if not is_inside(name) or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder} is damaged: the file name {name!r} leads out of it; use another checkpoint")
    return path


def is_inside(name: str) -> bool:
    """Whether a file name, by its letters, stays inside of the folder that it is relative to."""
    path = PurePath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _require(right: bool, wrong: str) -> None:
    if not right:
        raise Unsound(wrong)


def _are_counts(values: Any) -> bool:
    return isinstance(values, Sequence) and all(type(value) is int and value >= 0 for value in values)


def _require_tensor(key: str, stored: Any) -> None:
    _require(isinstance(stored, TensorStorageMetadata), f"{key} is a {type(stored).__name__}")
    dtype, size = stored.properties.dtype, stored.size
    _require(isinstance(dtype, torch.dtype) and dtype not in QUANTIZED, f"the dtype of {key} is {dtype!r}")
    _require(_are_counts(size), f"the shape of {key} is {size!r}")
    boxes = []
    for chunk in stored.chunks:
        _require(isinstance(chunk, ChunkStorageMetadata), f"a part of {key} is a {type(chunk).__name__}")
        right = _are_counts(chunk.offsets) and _are_counts(chunk.sizes)
        _require(right and len(chunk.offsets) == len(chunk.sizes) == len(size), f"a part of {key} has another rank")
        box = tuple(chunk.offsets), tuple(at + more for at, more in zip(chunk.offsets, chunk.sizes, strict=True))
        if prod(chunk.sizes):
            inside = all(end <= whole for end, whole in zip(box[1], size, strict=True))
            _require(inside, f"a part of {key} at {box[0]} is outside of its shape {tuple(size)}")
            boxes.append(box)
    _require(not any(_overlaps(boxes)), f"parts of {key} overlap")
    # Rows that are missing are refused where they are read.


def _overlaps(boxes: list[Box]) -> Iterator[bool]:
    """Whether each two boxes that may overlap do: compares neighbours along the dimension that is cut most often."""
    if len(boxes) < 2:
        return
    dimensions = range(len(boxes[0][0]))
    if not dimensions:
        yield True  # two numbers for one
        return
    most = max(dimensions, key=lambda dimension: len({start[dimension] for start, _ in boxes}))
    active: list[Box] = []
    for start, end in sorted(boxes, key=lambda box: box[0][most]):
        active = [box for box in active if box[1][most] > start[most]]
        for other in active:
            yield all(start[at] < other[1][at] and other[0][at] < end[at] for at in dimensions)
        active.append((start, end))


def _require_place(index: Any, place: Any) -> None:
    _require(isinstance(index, MetadataIndex) and type(index.fqn) is str, f"{index!r} is not the name of an entry")
    _require(isinstance(place, _StorageInfo), f"the place of {index.fqn} is a {type(place).__name__}")
    _require(index.offset is None or _are_counts(index.offset), f"a part of {index.fqn} is at {index.offset!r}")
    name = place.relative_path
    _require(type(name) is str and is_inside(name), f"{index.fqn} is in the file {name!r}, outside of the folder")
    _require(
        _are_counts([place.offset, place.length]), f"{index.fqn} is at {place.offset!r}, {place.length!r} in {name}"
    )


def _require_places(entries: Mapping[str, Any], places: Mapping[MetadataIndex, Any]) -> None:
    """Raise unless each entry has a place, which is large enough unless it is compressed."""
    for key, stored in entries.items():
        if isinstance(stored, BytesStorageMetadata):
            _require(MetadataIndex(key) in places, f"{key} is in no file")
            continue
        for chunk in stored.chunks:
            nbytes = prod(chunk.sizes) * stored.properties.dtype.itemsize
            place = places.get(MetadataIndex(key, chunk.offsets))
            _require(place is not None or not nbytes, f"the part of {key} at {tuple(chunk.offsets)} is in no file")
            if place is not None and not place.transform_descriptors:
                _require(place.length >= nbytes, f"{key} has {nbytes:,} bytes, its place {place.length:,}")


def _require_apart(places: Mapping[MetadataIndex, Any]) -> None:
    """Raise if two places overlap without being the same, which they are for tied weights."""
    of_file: dict[str, set[tuple[int, int]]] = {}
    for place in places.values():
        if place.length:
            of_file.setdefault(place.relative_path, set()).add((place.offset, place.offset + place.length))
    for name, ranges in of_file.items():
        for (_, end), (start, _) in pairwise(sorted(ranges)):
            _require(end <= start, f"entries overlap in {name} at byte {start:,}")

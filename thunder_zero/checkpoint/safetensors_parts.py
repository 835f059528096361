"""Writes safetensors files of limited size with their index, and removes older ones of that name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from thunder_zero.checkpoint.atomic_files import Create
from thunder_zero.checkpoint.safetensors_file import (
    INDEX_SUFFIX,
    MADE_HERE,
    SUFFIX,
    in_order_of_file,
    split_into_files,
    write_safetensors,
)
from thunder_zero.checkpoint.tensor_to_write import ReadTensor, TensorToWrite


def write_parts(
    create: Create,
    out: Path,
    tensors: Sequence[TensorToWrite],
    read: ReadTensor,
    notes: Mapping[str, str],
    max_file_bytes: int | None,
) -> list[Path]:
    """Write safetensors files, and last their index if there are several; reads as :func:`reading_order` says.

    Raises:
        ValueError: the format does not have a dtype.
        OSError: a file cannot be written.
    """
    files = split_into_files(tensors, max_file_bytes)
    numbered = [f"{out.stem}-{number:05}-of-{len(files):05}{SUFFIX}" for number in range(1, len(files) + 1)]
    paths = [out] if len(files) == 1 else [out.with_name(name) for name in numbered]
    for path, members in zip(paths, files, strict=True):
        with create(path) as stream:
            write_safetensors(stream, members, read, notes)
    if len(files) == 1:
        return paths
    where = {tensor.name: path.name for path, members in zip(paths, files, strict=True) for tensor in members}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors), **MADE_HERE}
    index = out.with_name(out.name + INDEX_SUFFIX)
    with create(index) as stream:
        stream.write(json.dumps({"metadata": total, "weight_map": where}, indent=1).encode() + b"\n")
    return [*paths, index]


def reading_order(tensors: Iterable[TensorToWrite], max_file_bytes: int | None) -> list[TensorToWrite]:
    """The tensors in the order in which :func:`write_parts` reads them."""
    return [tensor for members in split_into_files(tensors, max_file_bytes) for tensor in in_order_of_file(members)]


def remove_older(out: Path, written: Iterable[Path], is_ours: Callable[[Path], bool]) -> None:
    """Delete files that an earlier call wrote under this name and this one did not: a reader would mix them."""
    stem, dot, end = re.escape(out.stem), re.escape(SUFFIX), re.escape(INDEX_SUFFIX)
    named = re.compile(rf"{stem}(\.optimizer)?(-\d{{5,}}-of-\d{{5,}}{dot}|{dot}({end})?)")
    current = {path.name for path in written}
    for path in list(out.parent.iterdir()):
        if named.fullmatch(path.name) and path.name not in current and is_ours(path):
            path.unlink()


def is_made_here(path: Path) -> bool:
    """Whether :func:`write_parts` wrote a safetensors file, or an index, by its metadata."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            metadata = json.loads(path.read_text())["metadata"]
        else:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        return bool(metadata.items() >= MADE_HERE.items())
    except (SafetensorError, ValueError, LookupError, AttributeError, TypeError):
        return False

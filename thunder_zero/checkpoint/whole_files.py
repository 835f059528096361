"""Writes safetensors files one tensor at a time, and renames all files at the end.

A file has a length, a JSON header and the tensors' bytes (https://huggingface.co/docs/safetensors, "Format"). The
library ``safetensors`` would need all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from thunder_zero.checkpoint.folder import explain_write_error

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
MADE_HERE = {"made_by": "thunder_zero"}  # the mark in the metadata of files from ``tz``: only marked files are deleted
ALIGNMENT = 8  # bytes to which the first tensor's offset is aligned
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FILES_UNCHANGED = "existing files are unchanged"
Create = Callable[[Path], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """The description of a whole tensor to write to a file."""

    name: str  # the name in the file
    shape: tuple[int, ...]
    dtype: torch.dtype  # the dtype in the file
    key: str  # the key in the checkpoint
    aliases: tuple[str, ...] = ()  # further names of a tied weight

    @property
    def nbytes(self) -> int:
        """The tensor's size in the file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


ReadTensor = Callable[[TensorToWrite], Tensor]  # returns the values, in the file's dtype


def dtype_to_write(present: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return ``wanted`` if it is not None and the tensor is floating-point; otherwise return ``present``."""
    return wanted if wanted is not None and present.is_floating_point else present


@contextmanager
def create_together() -> Iterator[Create]:
    """Yield a function that opens a temporary file to write. Rename all files at the end of the block.

    If writing a file fails, existing files are unchanged.
    """
    written: list[tuple[Path, Path]] = []

    @contextmanager
    def create(path: Path) -> Iterator[BinaryIO]:
        temporary = path.with_name(f".{path.name}.writing")
        written.append((temporary, path))
        with explain_write_error(str(path), FILES_UNCHANGED), temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    try:
        yield create
        for temporary, path in written:
            with explain_write_error(str(path), FILES_UNCHANGED):
                temporary.replace(path)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)


def require_storable(tensors: Iterable[TensorToWrite]) -> None:
    """Raise ValueError unless the safetensors format supports the dtype of each tensor."""
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a safetensors file cannot hold {tensor.name} of {tensor.dtype}; write a .pt file")


def split_into_files(tensors: Iterable[TensorToWrite], max_bytes: int | None) -> list[list[TensorToWrite]]:
    """Group tensors into files with at most ``max_bytes`` of tensors. A larger tensor gets a file of its own.

    In a file, tensors with larger elements come first, so that all tensors are aligned.
    """
    files: list[list[TensorToWrite]] = [[]]
    size = 0  # bytes of the last file
    for tensor in tensors:
        if files[-1] and max_bytes is not None and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return [sorted(members, key=lambda tensor: -tensor.dtype.itemsize) for members in files]


def write_parts(
    create: Create,
    out: Path,
    tensors: Sequence[TensorToWrite],
    read: ReadTensor,
    notes: Mapping[str, str],
    max_file_bytes: int | None,
) -> list[Path]:
    """Write safetensors files, and an index if there are several files; return all paths.

    Tensors are read in the order of :func:`split_into_files`.

    Args:
        create: a function that opens a file to write.
        out: the path of the file. If there are several files, numbers follow the stem of the name.
        read: a function that returns a tensor's values.
        notes: further metadata of each file.
        max_file_bytes: the maximum bytes of tensors in a file; None writes one file.
    """
    require_storable(tensors)
    files = split_into_files(tensors, max_file_bytes)
    numbered = [f"{out.stem}-{number:05}-of-{len(files):05}{SUFFIX}" for number in range(1, len(files) + 1)]
    paths = [out] if len(files) == 1 else [out.with_name(name) for name in numbered]
    for path, members in zip(paths, files, strict=True):
        with create(path) as stream:
            _write_file(stream, members, read, notes)
    if len(files) == 1:
        return paths
    file_of_tensor = {tensor.name: path.name for path, members in zip(paths, files, strict=True) for tensor in members}
    metadata = {"total_size": sum(tensor.nbytes for tensor in tensors), **MADE_HERE}
    index = out.with_name(out.name + INDEX_SUFFIX)
    with create(index) as stream:
        stream.write(json.dumps({"metadata": metadata, "weight_map": file_of_tensor}, indent=1).encode() + b"\n")
    return [*paths, index]


def _write_file(stream: BinaryIO, tensors: Sequence[TensorToWrite], read: ReadTensor, notes: Mapping[str, str]) -> None:
    """Write one safetensors file. The file's metadata maps each alias to a tensor's name, as JSON."""
    header: dict[str, Any] = {}
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.nbytes]
        header[tensor.name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
        start += tensor.nbytes
    aliases = {alias: tensor.name for tensor in tensors for alias in tensor.aliases}
    metadata = {"format": "pt", **MADE_HERE, **notes, **({"aliases": json.dumps(aliases)} if aliases else {})}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        array: Any = read(tensor).contiguous().view(-1).view(torch.uint8).numpy()
        stream.write(memoryview(array))


def remove_older(out: Path, written: Iterable[Path], is_ours: Callable[[Path], bool]) -> None:
    """Delete files of an earlier save to the same path, since a reader would mix them with the new files.

    Args:
        out: the path of the save.
        written: the new files, which are kept.
        is_ours: a function that returns whether a file may be deleted.
    """
    stem, dot, end = re.escape(out.stem), re.escape(SUFFIX), re.escape(INDEX_SUFFIX)
    named = re.compile(rf"{stem}(\.optimizer)?(-\d{{5,}}-of-\d{{5,}}{dot}|{dot}({end})?)")
    current = {path.name for path in written}
    for path in list(out.parent.iterdir()):
        if named.fullmatch(path.name) and path.name not in current and is_ours(path):
            path.unlink()


def is_made_here(path: Path) -> bool:
    """Return whether :func:`write_parts` wrote a safetensors file or an index, according to the file's metadata."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            metadata = json.loads(path.read_text())["metadata"]
        else:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
        return bool(metadata.items() >= MADE_HERE.items())
    except (SafetensorError, ValueError, LookupError, AttributeError, TypeError):
        return False

"""Reads and writes safetensors files one tensor at a time: names, dtypes, indexes of several files.

A file has a length, a JSON header and the tensors' bytes (https://huggingface.co/docs/safetensors, "Format"). To write
a file, the library ``safetensors`` would need all of its tensors in memory at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
MADE_HERE = {"made_by": "thunder_zero"}  # the mark in the metadata of files from ``tz``: only marked files are deleted
ALIGNMENT = 8  # bytes to which the first tensor's offset is aligned
Create = Callable[[Path], AbstractContextManager[BinaryIO]]  # opens a file to write


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """The description of a whole tensor to write to a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str  # in the checkpoint
    aliases: tuple[str, ...] = ()  # further names of a tied weight

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


ReadTensor = Callable[[TensorToWrite], Tensor]  # returns the values, in the file's dtype


def dtype_to_write(present: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return ``wanted`` if it is not None and the tensor is floating-point; otherwise return ``present``."""
    return wanted if wanted is not None and present.is_floating_point else present


@cache
def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in a header; None if the library writes no elements of this dtype one by one."""
    try:
        element = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        header = save({"": element})[8 : -dtype.itemsize]
        (entry,) = json.loads(header).values()
    except (KeyError, RuntimeError):
        return None
    return entry["dtype"] if entry["shape"] == [1] else None


# Reading


class SafetensorsWeights(Mapping[str, Tensor]):
    """The tensors of a safetensors file, of an index, or of a folder that Hugging Face's ``save_pretrained`` wrote.

    A folder without an index has the tensors of all its files. Each tensor is read when it is asked for.
    """

    def __init__(self, path: Path) -> None:
        self._files: dict[str, Path] = {}  # by the tensor's name
        for file, names in _names_by_file(path):
            for name in names:
                if name in self._files:
                    raise ValueError(
                        f"{self._files[name].name} and {file.name} in {file.parent} both have {name!r}; give one of "
                        f"the files, or an index"
                    )
                self._files[name] = file

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name)

    def __contains__(self, name: object) -> bool:
        return name in self._files  # a Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read some rows of a tensor, by default all. A tensor without dimensions is read whole."""
        with _opened(self._files[name]) as file:
            part = file.get_slice(name)
            value: Tensor = file.get_tensor(name) if stop is None or not part.get_shape() else part[start:stop]
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        with _opened(self._files[name]) as file:
            return tuple(file.get_slice(name).get_shape())

    def describe(self, name: str, key: str, dtype: torch.dtype | None) -> TensorToWrite:
        """Describe a tensor, with the aliases that the metadata of its file names. ``dtype`` replaces a float dtype."""
        with _opened(self._files[name]) as file:
            shape, text = tuple(file.get_slice(name).get_shape()), (file.metadata() or {}).get("aliases", "{}")
        try:
            aliases = tuple(alias for alias, first in json.loads(text).items() if first == name)
        except (ValueError, AttributeError):
            raise ValueError(
                f"{self._files[name]} names its tied weights in {text!r:.80}, which is no JSON object; fetch it again"
            ) from None
        return TensorToWrite(name, shape, dtype_to_write(self.rows(name, 0, 0).dtype, dtype), key, aliases)


def _names_by_file(path: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a folder of safetensors files")
    indexes = [path] if path.name.endswith(INDEX_SUFFIX) else sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) > 1:
        raise ValueError(f"{path} has several indexes: {', '.join(index.name for index in indexes)}; give one of them")
    if indexes:
        yield from _named_by(indexes[0])
        return
    files = [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(
            f"{path} has no safetensors file; give the weights in files of torch.save as torch.load(file, mmap=True)"
        )
    for file in files:
        with _opened(file) as tensors:
            names = list(tensors.keys())
        yield file, names


def _named_by(index: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    """Yield each file that an index names, with the names of its tensors."""
    try:
        file_of_tensor: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = list(file_of_tensor.items())
    except (ValueError, LookupError, AttributeError, TypeError):
        raise ValueError(f"{index} is no index of safetensors files; save the model again") from None
    for file in dict.fromkeys(file_of_tensor.values()):
        with _opened(index.parent / file) as tensors:
            present = set(tensors.keys())
        expected = [name for name, other_file in names if other_file == file]
        if missing := [name for name in expected if name not in present]:
            raise ValueError(
                f"{index.name} says that {file} has {missing[0]!r}, which it does not; save the model again"
            )
        yield index.parent / file, expected


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist, and the index names it; fetch it, too") from None
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged ({error}); fetch it again") from None


# Writing


def require_storable(tensors: Iterable[TensorToWrite]) -> None:
    for tensor in tensors:
        if dtype_name(tensor.dtype) is None:
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

    Tensors are read in the order of :func:`split_into_files`. ``notes`` is further metadata of each file.
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
    index = out.with_name(out.stem + INDEX_SUFFIX)
    with create(index) as stream:
        stream.write(json.dumps({"metadata": metadata, "weight_map": file_of_tensor}, indent=1).encode() + b"\n")
    return [*paths, index]


def _write_file(stream: BinaryIO, tensors: Sequence[TensorToWrite], read: ReadTensor, notes: Mapping[str, str]) -> None:
    header: dict[str, Any] = {}
    start = 0
    for tensor in tensors:
        offsets = [start, start + tensor.nbytes]
        header[tensor.name] = {"dtype": dtype_name(tensor.dtype), "shape": tensor.shape, "data_offsets": offsets}
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
    """Delete our files of an earlier save to ``out``, since a reader would mix them with the new files ``written``."""
    stem, suffix, index = re.escape(out.stem), re.escape(SUFFIX), re.escape(INDEX_SUFFIX)
    named = re.compile(rf"{stem}(\.optimizer)?(-\d{{5,}}-of-\d{{5,}}{suffix}|{suffix}|{index})")
    current = {path.name for path in written}
    for path in list(out.parent.iterdir()):
        if named.fullmatch(path.name) and path.name not in current and is_ours(path):
            path.unlink()


def is_made_here(path: Path) -> bool:
    """Return whether :func:`write_parts` wrote a safetensors file or an index, according to the file's metadata."""
    try:
        if path.name.endswith(INDEX_SUFFIX):
            return bool(json.loads(path.read_text())["metadata"].items() >= MADE_HERE.items())
        with _opened(path) as file:
            return (file.metadata() or {}).items() >= MADE_HERE.items()
    except (ValueError, LookupError, AttributeError, TypeError):
        return False

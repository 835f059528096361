"""A few files of whole tensors that are written one tensor at a time: safetensors, and what ``torch.save`` writes.

Neither library writes so by itself. The safetensors format is a length, a JSON header and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format"). Of a ``torch.save`` file torch writes everything but the bytes
(``torch.serialization.skip_data``), and says where they belong.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # how torch's own documents use skip_data

from thunder_zero.runtime.folder import telling

DTYPES = {
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
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # of the first tensor's bytes


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is about to be written.

    Attributes:
        name: in the file.
        shape: of all of it.
        dtype: in the file.
        aliases: its other names (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


Read = Callable[[Whole], Tensor]  # the values, in the file's dtype


def write_safetensors(path: Path, wholes: Sequence[Whole], read: Read, notes: Mapping[str, str]) -> None:
    """Write one safetensors file; aliases are recorded in its metadata, as JSON from alias to name.

    Raises:
        ValueError: a dtype that the format does not have.
        OSError: it cannot be written.
    """
    header: dict[str, Any] = {}
    start = 0
    for whole in wholes:
        if whole.dtype not in DTYPES:
            raise ValueError(
                f"{whole.name} is {whole.dtype}, which safetensors files cannot hold; give dtype, or write a .pt file"
            )
        offsets = [start, start + whole.nbytes]
        header[whole.name] = {"dtype": DTYPES[whole.dtype], "shape": whole.shape, "data_offsets": offsets}
        start += whole.nbytes
    aliases = {alias: whole.name for whole in wholes for alias in whole.aliases}
    metadata = {"format": "pt", **notes, **({"aliases": json.dumps(aliases)} if aliases else {})}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with _replacing(path) as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for whole in wholes:
            stream.write(_bytes_of(read(whole)))


def write_torch(path: Path, wholes: Sequence[Whole], read: Read, nest: Callable[[dict[str, Any]], Any]) -> None:
    """Write one file as ``torch.save`` does; an alias is the same tensor under another name.

    Args:
        path: the file.
        wholes: its tensors.
        read: gives their values.
        nest: makes what is saved of the tensors by name, aliases included.

    Raises:
        OSError: it cannot be written.
    """
    with FakeTensorMode():
        fakes = {whole.name: torch.empty(whole.shape, dtype=whole.dtype) for whole in wholes}
    fakes |= {alias: fakes[whole.name] for whole in wholes for alias in whole.aliases}
    with _replacing(path) as stream:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(nest(fakes), stream)
        stream.flush()
        with FakeTensorMode():
            found = _tensors_of(torch.load(stream.name, weights_only=False))  # written by this process
        places = dict(zip(_names_of(nest({name: Name(name) for name in fakes})), found, strict=True))
        for whole in wholes:
            if whole.nbytes:
                place = places[whole.name].untyped_storage()._checkpoint_offset
                assert place is not None, "torch.load under FakeTensorMode says it"
                stream.seek(place)
                stream.write(_bytes_of(read(whole)))


def in_files(wholes: Iterable[Whole], max_bytes: int | None) -> list[list[Whole]]:
    """Cut into files of at most so many bytes of tensors; a larger tensor has a file of its own."""
    files: list[list[Whole]] = [[]]
    for whole in wholes:
        full = sum(other.nbytes for other in files[-1])
        if files[-1] and max_bytes is not None and full + whole.nbytes > max_bytes:
            files.append([])
        files[-1].append(whole)
    return files


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that has its name once it is whole."""
    beside = path.with_name(f".{path.name}.writing")
    with telling(path.name):
        try:
            with beside.open("w+b") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(tree) if isinstance(leaf, Tensor)]


def _names_of(tree: Any) -> list[str]:
    """The names where :func:`_tensors_of` has tensors, in a tree of names that stand for them."""
    return [leaf.name for leaf in _leaves(tree) if isinstance(leaf, Name)]


@dataclass(frozen=True, slots=True)
class Name:
    """Stands for a tensor."""

    name: str


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value)
    else:
        yield tree

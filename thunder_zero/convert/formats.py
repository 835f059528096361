"""A few files of whole tensors that are written one tensor at a time: safetensors, and what ``torch.save`` writes.

Neither library writes so by itself. The safetensors format is a length, a JSON header and the tensors' bytes
(https://huggingface.co/docs/safetensors, "Format"). A ``torch.save`` file is a zip archive with a pickle that names
storages, and a record of bytes for each (https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from thunder_zero.checkpoint.folder import telling

STAYS = "what was there before stays"
SAFETENSORS = ".safetensors"
INDEX = ".index.json"
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
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
FLOATS = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
MADE_HERE = {"made_by": "thunder_zero"}  # in the metadata: only such files are ours to remove
ALIGNMENT = 8  # of the first tensor's bytes in a safetensors file
RECORD_ALIGNMENT = 64  # of each record's bytes in a torch file, as torch.load(mmap=True) likes them
RECORD_HEADER = 30 + 20 + 4  # bytes before them: the zip format's, its 64-bit sizes, the padding's own


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is about to be written.

    Attributes:
        name: in the file.
        shape: of all of it.
        dtype: in the file.
        key: what it is read by.
        aliases: its other names (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


Read = Callable[[Whole], Tensor]  # the values, in the file's dtype
Create = Callable[[Path], AbstractContextManager[BinaryIO]]


def require_float(dtype: torch.dtype | None) -> None:
    """Raise unless floating-point tensors can be written in a dtype (None: in their own).

    Raises:
        ValueError: they cannot.
    """
    if dtype is not None and not (dtype in DTYPES and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; give a floating-point dtype, such as torch.bfloat16, or None")


@contextmanager
def together() -> Iterator[Create]:
    """Files that have their names once all of them are whole; what it yields opens one to write.

    Raises:
        OSError: one cannot be written; what was there stays.
    """
    written: list[tuple[Path, Path]] = []

    @contextmanager
    def create(path: Path) -> Iterator[BinaryIO]:
        beside = path.with_name(f".{path.name}.writing")
        written.append((beside, path))
        with telling(str(path), STAYS), beside.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    try:
        yield create
        for beside, path in written:
            with telling(str(path), STAYS):
                beside.replace(path)
    finally:
        for beside, _ in written:
            beside.unlink(missing_ok=True)


def write_safetensors(stream: BinaryIO, wholes: Iterable[Whole], read: Read, notes: Mapping[str, str]) -> None:
    """Write one safetensors file; aliases are recorded in its metadata, as JSON from alias to name.

    Raises:
        ValueError: a dtype that the format does not have.
        OSError: it cannot be written.
    """
    wholes = sorted(wholes, key=lambda whole: -whole.dtype.itemsize)  # so that all are aligned
    header: dict[str, Any] = {}
    start = 0
    for whole in wholes:
        if whole.dtype not in DTYPES:
            raise ValueError(f"{whole.name} is {whole.dtype}, which safetensors files cannot hold; write a .pt file")
        offsets = [start, start + whole.nbytes]
        header[whole.name] = {"dtype": DTYPES[whole.dtype], "shape": whole.shape, "data_offsets": offsets}
        start += whole.nbytes
    aliases = {alias: whole.name for whole in wholes for alias in whole.aliases}
    metadata = {"format": "pt", **MADE_HERE, **notes, **({"aliases": json.dumps(aliases)} if aliases else {})}
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for whole in wholes:
        stream.write(_bytes_of(read(whole)))


def in_files(wholes: Iterable[Whole], max_bytes: int | None) -> list[list[Whole]]:
    """Cut into files of at most so many bytes of tensors; a larger tensor has a file of its own."""
    files: list[list[Whole]] = [[]]
    full = 0  # bytes of the last file
    for whole in wholes:
        if files[-1] and max_bytes is not None and full + whole.nbytes > max_bytes:
            files.append([])
            full = 0
        files[-1].append(whole)
        full += whole.nbytes
    return files


def write_torch(stream: BinaryIO, tree: Any, read: Read) -> None:
    """Write one file as ``torch.save`` does.

    Args:
        stream: the file.
        tree: what is saved: nested dicts and lists of values; a :class:`Whole` stands for a tensor, and is one tensor
            under all its names.
        read: gives the values of those.

    Raises:
        OSError: it cannot be written.
    """
    pickled = io.BytesIO()
    pickler = TorchPickler(pickled)
    pickler.dump(tree)
    with zipfile.ZipFile(stream, "w") as archive:
        _record(archive, stream, "data.pkl", pickled.getvalue())
        _record(archive, stream, "byteorder", sys.byteorder.encode())
        for key, found in enumerate(pickler.tensors):
            content = _bytes_of(read(found) if isinstance(found, Whole) else found)
            _record(archive, stream, f"data/{key}", content)
            del content  # before the next is read
        _record(archive, stream, "version", b"3\n")


def _record(archive: zipfile.ZipFile, stream: BinaryIO, name: str, content: bytes | memoryview) -> None:
    """Add a record, whose bytes are aligned; zipfile puts its CRC into the header once they are written."""
    info = zipfile.ZipInfo(f"archive/{name}")
    padding = -(stream.tell() + RECORD_HEADER + len(info.filename)) % RECORD_ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding  # as torch pads
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(content)


@dataclass(frozen=True, slots=True)
class Storage:
    """Stands for the bytes of a tensor in a torch file: its class, the name of its record, how many elements."""

    kind: type
    key: str
    count: int


class TorchPickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and collects the tensors, in the order of their storages' names."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, protocol=2)  # the one that torch.load(weights_only=True) reads
        self.tensors: list[Whole | Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """A dense tensor as torch reduces one, on a storage that is written later."""
        if not isinstance(value, Whole) and not (isinstance(value, Tensor) and value.layout is torch.strided):
            return NotImplemented
        empty = torch.empty(0, dtype=value.dtype)
        rebuild, (storage, _, _, _, *rest) = empty.__reduce_ex__(2)
        count = prod(value.shape)
        kind: type = torch.UntypedStorage
        if not isinstance(storage, kind):
            kind = getattr(torch, empty.type().removeprefix("torch.").replace("Tensor", "Storage"))
        else:
            count *= value.dtype.itemsize
        strides = torch.empty(value.shape, device="meta").stride()
        place = Storage(kind, str(len(self.tensors)), count)
        self.tensors.append(value)
        return rebuild, (place, 0, tuple(value.shape), strides, *rest)

    def persistent_id(self, value: Any) -> Any:
        """What torch.load finds a storage by."""
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, Storage) else None


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)

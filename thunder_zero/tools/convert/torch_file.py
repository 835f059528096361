"""Writes a file as ``torch.save`` does, one tensor at a time, which ``torch.save`` cannot.

Such a file is a zip archive with a pickle that names storages, and a record of bytes for each
(https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from thunder_zero.checkpoint.tensor_to_write import ReadTensor, TensorToWrite, raw_bytes

RECORD_ALIGNMENT = 64  # bytes, of each record's content: as torch.load(mmap=True) likes it
RECORD_HEADER_BYTES = 30 + 20 + 4  # the zip format's header, its 64-bit sizes, the padding's own header


def write_torch(stream: BinaryIO, tree: Any, read: ReadTensor) -> None:
    """Write one file as ``torch.save`` does.

    Args:
        stream: the file.
        tree: nested dicts and lists of values, with a :class:`TensorToWrite` for each tensor; if it appears under
            several names, they share one tensor in the file.
        read: reads the values of those.

    Raises:
        OSError: the file cannot be written.
    """
    pickled = io.BytesIO()
    pickler = TorchPickler(pickled)
    pickler.dump(tree)
    with zipfile.ZipFile(stream, "w") as archive:
        _add_record(archive, stream, "data.pkl", pickled.getvalue())
        _add_record(archive, stream, "byteorder", sys.byteorder.encode())
        for key, found in enumerate(pickler.tensors):
            content = raw_bytes(read(found) if isinstance(found, TensorToWrite) else found)
            _add_record(archive, stream, f"data/{key}", content)
            del content  # before the next is read
        _add_record(archive, stream, "version", b"3\n")


def _add_record(archive: zipfile.ZipFile, stream: BinaryIO, name: str, content: bytes | memoryview) -> None:
    """Add a record with aligned content; zipfile puts the CRC into its header once the content is written."""
    info = zipfile.ZipInfo(f"archive/{name}")
    padding = -(stream.tell() + RECORD_HEADER_BYTES + len(info.filename)) % RECORD_ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding  # as torch pads
    with archive.open(info, "w", force_zip64=True) as record:
        record.write(content)


@dataclass(frozen=True, slots=True)
class Storage:
    """Describes a tensor's bytes in a torch file: the storage's class, the name of its record, its elements."""

    kind: type
    key: str
    count: int


class TorchPickler(pickle.Pickler):
    """Pickles as ``torch.save`` does, and collects the tensors in the order of their records."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream, protocol=2)  # torch.load(weights_only=True) reads no other
        self.tensors: list[TensorToWrite | Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """Reduce a dense tensor as torch does, on a storage that is written later."""
        if not isinstance(value, TensorToWrite) and not (isinstance(value, Tensor) and value.layout is torch.strided):
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
        """How torch.load finds a storage."""
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, Storage) else None

"""Writes safetensors files one tensor at a time, which the library cannot.

The format is a length, a JSON header and the tensors' bytes (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch

from thunder_zero.checkpoint.tensor_to_write import ReadTensor, TensorToWrite, raw_bytes

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
MADE_HERE = {"made_by": "thunder_zero"}  # in the metadata: we remove only such files
ALIGNMENT = 8  # bytes, of the first tensor
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


def require_storable(tensors: Iterable[TensorToWrite]) -> None:
    """Raise unless safetensors files can hold these tensors.

    Raises:
        ValueError: the format does not have a dtype.
    """
    for tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"a safetensors file cannot hold {tensor.name} of {tensor.dtype}; write a .pt file")


def write_safetensors(
    stream: BinaryIO, tensors: Iterable[TensorToWrite], read: ReadTensor, notes: Mapping[str, str]
) -> None:
    """Write one safetensors file, with aliases as JSON from alias to name in its metadata.

    Raises:
        ValueError: the format does not have a dtype.
        OSError: the file cannot be written.
    """
    tensors = in_order_of_file(tensors)
    require_storable(tensors)
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
        stream.write(raw_bytes(read(tensor)))


def in_order_of_file(tensors: Iterable[TensorToWrite]) -> list[TensorToWrite]:
    """The tensors as a file has them: those with large elements first, so that all are aligned."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def split_into_files(tensors: Iterable[TensorToWrite], max_bytes: int | None) -> list[list[TensorToWrite]]:
    """Group tensors into files of at most ``max_bytes`` of tensors; a larger tensor gets a file of its own."""
    files: list[list[TensorToWrite]] = [[]]
    size = 0  # bytes of the last file
    for tensor in tensors:
        if files[-1] and max_bytes is not None and size + tensor.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files

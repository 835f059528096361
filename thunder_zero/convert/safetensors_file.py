"""Writes safetensors files one tensor at a time, which the library cannot.

The format is a length, a JSON header and the tensors' bytes (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch

from thunder_zero.convert.whole_tensor import ReadTensor, WholeTensor, bytes_of

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
MADE_HERE = {"made_by": "thunder_zero"}  # in the metadata: we remove only such files
ALIGNMENT = 8  # bytes, of the first tensor
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


def require_float(dtype: torch.dtype | None) -> None:
    """Raise unless floating-point tensors can be written in a dtype (None: in their own).

    Raises:
        ValueError: they cannot.
    """
    if dtype is not None and not (dtype in DTYPES and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; give a floating-point dtype, such as torch.bfloat16, or None")


def write_safetensors(
    stream: BinaryIO, wholes: Iterable[WholeTensor], read: ReadTensor, notes: Mapping[str, str]
) -> None:
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
        stream.write(bytes_of(read(whole)))


def split_into_files(wholes: Iterable[WholeTensor], max_bytes: int | None) -> list[list[WholeTensor]]:
    """Cut into files of at most so many bytes of tensors; a larger tensor has a file of its own."""
    files: list[list[WholeTensor]] = [[]]
    full = 0  # bytes of the last file
    for whole in wholes:
        if files[-1] and max_bytes is not None and full + whole.nbytes > max_bytes:
            files.append([])
            full = 0
        files[-1].append(whole)
        full += whole.nbytes
    return files

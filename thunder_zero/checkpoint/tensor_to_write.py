"""A whole tensor that is about to be written to a file, and the dtypes that it may have there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor that is about to be written.

    Attributes:
        name: in the file.
        shape: of the whole tensor.
        dtype: in the file.
        key: its key in the checkpoint.
        aliases: its other names (tied weights).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: str
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize


ReadTensor = Callable[[TensorToWrite], Tensor]  # its values, in the file's dtype


def dtype_to_write(found: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor is written in: ``dtype``, if that is given and the tensor has floats."""
    return dtype if dtype is not None and found.is_floating_point else found


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)

"""What an encoding is: how many bytes elements take, how these are written and read; a cast is one.

::

    Encoding(torch.bfloat16)     2 bytes an element
    Int8(block=128)              a byte an element, 4 bytes a block: its scale in float32
    NF4(block=64)                half a byte an element, 4 bytes a block; rows of frozen parameters, at rest too

``plan/params.py`` asks ``nbytes`` for what a collective of a parameter sends; memory, forecasts, proofs, reports read
the plan. ``sharded/wire.py`` encodes and decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST_BLOCK = 1 << 16  # a scale for more says little of most of them
SCALE_BYTES = 4  # of a float32; elements are padded to a multiple of it, so that the scales of all ranks are aligned
PIECE = 1 << 19  # elements at a time on a CPU: buffers of 2 MiB stay in the cache, and operators cost little a piece
PIECE_ON_GPU = 1 << 22  # 16 MiB each: as many launches as such a tensor needs anyway


def piece_on(device: torch.device) -> int:
    """Return how many elements are encoded or decoded at a time on a device."""
    return PIECE if device.type == "cpu" else PIECE_ON_GPU


@dataclass(frozen=True)
class Encoding:
    """How elements travel.

    Attributes:
        dtype: of an element.
        block: consecutive elements, in row-major order, that share a scale; 0: none do, and the dtype alone decides.
    """

    dtype: torch.dtype
    block: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 0:
            raise ValueError(f"block is {self.block!r}; give a number of elements that share a scale")

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def blocks(self, numel: int) -> int:
        """Return how many scales so many elements have."""
        return -(-numel // self.block) if self.block else 0

    def nbytes(self, numel: int) -> int:
        """Return the bytes that so many elements take, with their scales.

        >>> Encoding(torch.bfloat16).nbytes(1000)
        2000
        """
        nbytes = numel * self.dtype.itemsize
        return nbytes if not self.block else SCALE_BYTES * self.blocks(numel) + -(-nbytes // SCALE_BYTES) * SCALE_BYTES

    def encode(self, x: Tensor, *, piece: int | None = None) -> Tensor:
        """Return the payload of a tensor: cast, or ``x`` itself. ``piece``: elements at a time (default: by the
        device)."""
        return x.to(self.dtype)

    def decode(self, payload: Tensor, out: Tensor, *, piece: int | None = None) -> Tensor:
        """Read a payload into ``out``, of the shape that was encoded and any floating-point dtype, and return it."""
        return out.copy_(payload)


@dataclass(frozen=True, repr=False)
class Blocks(Encoding, ABC):
    """Bytes with a scale for each block. A class of your own defines ``encode``, ``decode`` and ``error``."""

    dtype: torch.dtype = field(default=torch.int8, init=False)
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.block:
            raise ValueError("block is 0; give a number of elements that share a scale, such as 128")
        if self.block > LARGEST_BLOCK:
            raise ValueError(f"block is {self.block}; give at most {LARGEST_BLOCK:,} elements that share a scale")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(block={self.block})"

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}/{self.block}"

    @abstractmethod
    def encode(self, x: Tensor, *, piece: int | None = None) -> Tensor:
        """Return the payload of a floating-point tensor, uint8 (``nbytes(n)``,)."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, piece: int | None = None) -> Tensor:
        """Read a payload into ``out``, floating-point and contiguous, and return it."""

    @abstractmethod
    def error(self, rounds: str) -> str:
        """Return how far an element may be off, in words; it ``rounds`` "to nearest" or "at random"."""

"""Defines encodings: payload sizes, encoding and decoding. A cast is an encoding.

::

    Encoding(torch.bfloat16)     2 bytes per element
    Int8(block=128)              1 byte per element, 4 bytes per block: its scale in float32
    NF4(block=64)                half a byte per element, 4 bytes per block: for frozen parameters, also at rest

``plan/params.py`` calls ``nbytes`` to compute the bytes that collectives send. Forecasts, proofs and reports take these
bytes from the plan. ``sharded/wire.py`` encodes and decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

LARGEST_BLOCK = 1 << 16  # elements; in a longer block most elements would round to 0, since the largest sets the scale
SCALE_BYTES = 4  # a float32; payloads are padded to a multiple of it, so that the scales of all ranks are aligned
PIECE = 1 << 19  # elements at a time on a CPU: buffers of 2 MiB stay in the cache, with little overhead per piece
PIECE_ON_GPU = 1 << 22  # elements at a time on a GPU: with buffers of 16 MiB, launches have little overhead


def piece_on(device: torch.device) -> int:
    """Return the number of elements that are encoded or decoded at a time on a device."""
    return PIECE if device.type == "cpu" else PIECE_ON_GPU


@dataclass(frozen=True)
class Encoding:
    """The encoding of elements on the wire: a cast, unless a subclass overrides it."""

    dtype: torch.dtype  # the dtype of an encoded element
    block: int = 0  # the number of consecutive elements, in row-major order, that share a scale; 0: there are no scales

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 0:
            raise ValueError(f"block is {self.block!r}; give a number of elements that share a scale")

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def blocks(self, numel: int) -> int:
        return -(-numel // self.block) if self.block else 0

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` encoded elements and their scales.

        >>> Encoding(torch.bfloat16).nbytes(1000)
        2000
        """
        nbytes = numel * self.dtype.itemsize
        return nbytes if not self.block else SCALE_BYTES * self.blocks(numel) + -(-nbytes // SCALE_BYTES) * SCALE_BYTES

    def encode(self, x: Tensor, *, piece: int | None = None) -> Tensor:
        """Return the payload: ``x`` in the dtype of this encoding. ``piece`` elements are encoded at a time."""
        return x.to(self.dtype)

    def decode(self, payload: Tensor, out: Tensor, *, piece: int | None = None) -> Tensor:
        """Decode a payload into ``out``, and return ``out``: a floating-point tensor of the encoded shape."""
        return out.copy_(payload)


@dataclass(frozen=True, repr=False)
class Blocks(Encoding, ABC):
    """An encoding with a scale for each block of elements."""

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
        """Return the payload of a floating-point tensor of n elements, a uint8 tensor of ``nbytes(n)`` bytes."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, *, piece: int | None = None) -> Tensor:
        """Decode a payload into ``out``, a contiguous floating-point tensor, and return ``out``."""

    @abstractmethod
    def error(self, rounds: str) -> str:
        """Describe the largest error of an element. ``rounds`` is "to nearest" or "at random"."""

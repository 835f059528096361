"""How elements travel: as they are, cast, or as bytes with a scale for each block. Frozen data.

::

    Encoding(torch.bfloat16)     2 bytes an element
    Int8(block=128)              a byte an element, 4 bytes a block: its scale in float32
    NF4(block=64)                half a byte an element, 4 bytes a block; of each row of a frozen parameter, at rest too

What a collective of a parameter sends is counted here alone: memory, forecasts, proofs and reports read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

LARGEST_BLOCK = 1 << 16  # a scale for more says little of most of them
SCALE_BYTES = 4  # of a float32; elements are padded to a multiple of it, so that the scales of all ranks are aligned


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
        name = str(self.dtype).removeprefix("torch.").partition("_")[0]
        return f"{name}/{self.block}" if self.block else str(self.dtype).removeprefix("torch.")

    def blocks(self, numel: int) -> int:
        """Return how many scales so many elements have."""
        return -(-numel // self.block) if self.block else 0

    def nbytes(self, numel: int) -> int:
        """Return the bytes that so many elements take, with their scales.

        >>> Int8(128).nbytes(1000)
        1032
        """
        nbytes = numel * self.dtype.itemsize
        return nbytes if not self.block else SCALE_BYTES * self.blocks(numel) + -(-nbytes // SCALE_BYTES) * SCALE_BYTES


@dataclass(frozen=True, repr=False)
class _Bytes(Encoding):
    """Bytes with a scale for each block, of which ``largest`` stands for the largest of its block."""

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


@dataclass(frozen=True, repr=False)
class Int8(_Bytes):
    """Integers of 8 bits, each a multiple of its block's scale: the largest magnitude of the block, over 127.

    Gathers round to nearest, so an element is off by half a step at most: 0.4% of the largest of its block. Reductions
    round up or down at random, so that the mean is right, and an element of one rank is off by less than a whole step.
    A step is 2 ** -126 at least, which is more than that where all elements of a block are below 1.5e-36.

    Attributes:
        block: elements that share a scale.

    Raises:
        ValueError: ``block`` is no number of elements.
    """

    largest = 127.0

    def error(self, rounds: str) -> str:
        """Return how far an element may be off, in words; it ``rounds`` "to nearest" or "at random"."""
        steps, share = ("a whole step", "0.8%") if rounds == "at random" else ("half a step", "0.4%")
        return f"{steps}, {share} of the largest in its block, or {steps} of 2 ** -126"


@dataclass(frozen=True, repr=False)
class NF4(_Bytes):
    """4 bits an element: one of the 16 levels of NormalFloat (Dettmers et al., QLoRA, 2023), times its block's scale,
    the largest magnitude of the block.

    Frozen parameters alone rest so, row by row. An element is off by 15.2% of the largest of its block at most; of
    normally distributed ones each level stands for as many.

    Attributes:
        block: elements that share a scale, an even number; each row begins with a new block.

    Raises:
        ValueError: ``block`` is no even number of elements.
    """

    dtype: torch.dtype = field(default=torch.uint8, init=False)
    block: int = 64
    largest = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 2:
            raise ValueError(f"block is {self.block}; give an even number of elements, as two share a byte")

    def __str__(self) -> str:
        return f"nf4/{self.block}"

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a row of so many elements, with its scales.

        >>> NF4(64).nbytes(1000)
        564
        """
        return SCALE_BYTES * self.blocks(numel) + -(-numel // (2 * SCALE_BYTES)) * SCALE_BYTES

    def error(self, rounds: str) -> str:
        """Return how far an element may be off, in words."""
        return "15.2% of the largest in its block"

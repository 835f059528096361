"""Encodes rows of frozen parameters as 4-bit levels with a scale for each block.

::

    a row of n elements    [ a float32 scale for each block | two elements per byte, first in its upper half | padding ]

    encode   x (rows, n)   ->  bytes (rows, NF4.nbytes(n))    scale = max |x| of the block; level nearest to x / scale
    decode   bytes         ->  x (rows, n)                    level * scale

Each row has its own blocks, so that the bytes of a row do not depend on the number of ranks. The levels and the order
of elements are as in bitsandbytes, except that its blocks continue from row to row.

Encoding decoded values again, in the dtype of the original, gives equal bytes: the largest element of a block is
exactly its scale times 1 or -1. A block with Inf or NaN is decoded as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod

import torch
from torch import Tensor

from thunder_zero.encodings.encoding import SCALE_BYTES, Blocks, piece_on

# Quantiles of a normal distribution, scaled to -1 and 1, with an exact 0 (Dettmers et al., QLoRA, 2023, appendix E).
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CELLS = 64  # equal parts of -1 to 1: each has at most one midpoint of two levels


@dataclass(frozen=True, repr=False)
class NF4(Blocks):
    """4 bits per element: one of the 16 levels of NormalFloat, times the largest magnitude of its block.

    The levels are from Dettmers et al., QLoRA, 2023. If elements are normally distributed, all levels are equally
    frequent. Only frozen parameters are stored in this format, row by row. The error of an element is at most 15.2% of
    the largest element of its block.

    ``block`` is the number of elements that share a scale, an even number up to 65,536. Each row begins a new block.
    """

    dtype: torch.dtype = field(default=torch.uint8, init=False)
    block: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % 2:
            raise ValueError(f"block is {self.block}; give an even number of elements, as two share a byte")

    def nbytes(self, numel: int) -> int:
        """Return the bytes of a row: ``numel`` encoded elements and their scales.

        >>> NF4(64).nbytes(1000)
        564
        """
        return SCALE_BYTES * self.blocks(numel) + -(-numel // (2 * SCALE_BYTES)) * SCALE_BYTES

    def error(self, rounds: str) -> str:
        return "15.2% of the largest in its block"

    @torch.no_grad()
    def encode(self, x: Tensor, *, piece: int | None = None) -> Tensor:
        """Encode floating-point rows of shape (rows, ...) as a uint8 tensor of shape (rows, bytes of a row)."""
        width = prod(x.shape[1:])
        flat, blocks = x.detach().reshape(len(x), width), self.blocks(width)
        payload = torch.zeros(len(flat), self.nbytes(width), dtype=torch.uint8, device=flat.device)
        for start, stop in _pieces(flat, piece):
            values = torch.zeros(stop - start, blocks * self.block, device=flat.device)
            values[:, :width] = flat[start:stop]
            values = values.view(stop - start, blocks, self.block)
            scales = values.abs().amax(2)
            scales.masked_fill_(scales.isinf(), torch.nan)
            values /= scales.masked_fill(scales == 0, 1.0).unsqueeze(2)
            codes = _nearest(values).view(stop - start, -1, 2)
            payload[start:stop].view(torch.float32)[:, :blocks] = scales
            pairs = (codes[..., 0] << 4) | codes[..., 1]
            self._codes(payload[start:stop], width).copy_(pairs[:, : -(-width // 2)])
        return payload

    def parts(self, payload: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return views of the codes and the scales of rows of ``width`` elements."""
        return self._codes(payload, width), payload.view(torch.float32)[:, : self.blocks(width)]

    def joined(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the payload of rows: uint8 codes, two a byte, of shape (rows, n / 2), and float32 scales."""
        width = 2 * codes.shape[1]
        payload = codes.new_zeros(len(codes), self.nbytes(width))
        for part, value in zip(self.parts(payload, width), (codes, scales), strict=True):
            part.copy_(value)
        return payload

    @torch.no_grad()
    def decode(self, payload: Tensor, out: Tensor, *, piece: int | None = None) -> Tensor:
        """Decode the bytes of rows into ``out``, of shape (rows, ...), and return ``out``."""
        width = prod(out.shape[1:])
        flat = out.view(len(out), width)
        end = width // self.block * self.block
        pairs = pairs_on(payload.device)
        for start, stop in _pieces(flat, piece):
            codes = self._codes(payload[start:stop], width)
            scales = payload[start:stop].view(torch.float32)[:, : self.blocks(width)]
            # one look-up of a byte returns two levels
            levels = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32).view(stop - start, -1)
            levels = levels[:, :width]
            levels[:, :end].unflatten(1, (-1, self.block)).mul_(scales[:, : end // self.block].unsqueeze(2))
            levels[:, end:].mul_(scales[:, end // self.block :])
            flat[start:stop] = levels
        return out

    def _codes(self, payload: Tensor, width: int) -> Tensor:
        begin = SCALE_BYTES * self.blocks(width)
        return payload[:, begin : begin + -(-width // 2)]


def _pieces(flat: Tensor, piece: int | None) -> Iterator[tuple[int, int]]:
    step = max((piece or piece_on(flat.device)) // max(flat.shape[1], 1), 1)
    for start in range(0, len(flat), step):
        yield start, min(start + step, len(flat))


def _nearest(values: Tensor) -> Tensor:
    """Return the code of the nearest level of each value from -1 to 1, uint8; of two equally near ones the lower."""
    lowest, midpoints = cells_on(values.device)
    cells = (values * (CELLS // 2)).add_(CELLS // 2).int().view(-1).clamp_(0, CELLS)  # NaN is in any cell
    codes = lowest.index_select(0, cells)
    codes += values.view(-1) > midpoints.index_select(0, cells)
    return codes


@cache
def cells_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each cell of -1 to 1 the code of its lowest value, and the midpoint of levels in it, if any, or Inf.

    Comparing with one midpoint takes a quarter of the time of ``torch.bucketize``, which searches them.
    """
    levels = torch.tensor(LEVELS)
    midpoints = (levels[1:] + levels[:-1]) / 2
    cell_of = ((midpoints + 1) * (CELLS // 2)).long()
    lowest = torch.bucketize(torch.arange(CELLS + 1), cell_of, right=False)
    bounds = torch.full((CELLS + 1,), torch.inf).index_copy_(0, cell_of, midpoints)
    return lowest.to(device, torch.uint8), bounds.to(device)


@cache
def pairs_on(device: torch.device) -> Tensor:
    """Return the two float32 levels of each byte, as an int64 tensor of shape (256,)."""
    levels = torch.tensor(LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int64).view(-1).to(device)

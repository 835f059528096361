"""Encodes payloads as 8-bit integers with a scale for each block.

::

    payload of n elements    [ a float32 scale for each block | n elements of 1 byte | padding to a multiple of 4 ]

    encode  x (n,)           ->  payload         scale = max |x| of the block / 127;  element = x / scale, rounded
    decode  payload          ->  x (n,)          element * scale;  ``add`` adds this to ``out``

Encode and decode work in pieces. On a CPU a piece stays in the cache; on a GPU most tensors are one piece. A block with
Inf or NaN has the scale NaN, so all of its elements are decoded as NaN.

Dithered rounding is floor(x / scale + u), for u uniform in [0, 1): its mean is x / scale (Gray and Stockham, Dithered
quantizers, 1993). Here u is a Weyl sequence over the elements of a piece. The start of the sequence is a hash of the
parameter, the sender, and a count of the sender's reductions. The sequence costs nothing, is reproducible, and is
uniform over the hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from thunder_zero.encodings.encoding import SCALE_BYTES, Blocks, piece_on

LEAST = torch.finfo(torch.float32).tiny  # the least scale: its inverse is finite
GOLDEN = 0.6180339887498949  # the step of the Weyl sequence, the golden ratio's fractional part
STARTS = 1 << 16  # the number of possible starts of the sequence
BELOW_1 = 1 - 2**-13  # the largest number of the sequence: added to 127 and a few ulps, it stays below 128


@dataclass(frozen=True, repr=False)
class Int8(Blocks):
    """8-bit integers. The scale of a block is its largest magnitude, divided by 127.

    Gathers round to nearest: the error of an element is at most half a step, 0.4% of the largest element of its block.
    Reductions round stochastically, which is unbiased: the error of a rank's element is less than a step. A step is at
    least 2 ** -126, so the bound of 0.4% does not hold for a block whose elements are all below 1.5e-36.

    >>> Int8(128).nbytes(1000)
    1032

    ``block`` is the number of elements that share a scale, up to 65,536.
    """

    largest = 127.0

    def error(self, rounds: str) -> str:
        steps, percent = ("a whole step", "0.8%") if rounds == "at random" else ("half a step", "0.4%")
        return f"{steps}, {percent} of the largest in its block, or {steps} of 2 ** -126"

    def encode(self, x: Tensor, *, out: Tensor | None = None, key: str = "", piece: int | None = None) -> Tensor:
        """Return the payload, written to ``out`` if given. The hash of ``key`` seeds rounding; "" rounds to nearest."""
        x, piece = x.detach().reshape(-1), piece or piece_on(x.device)
        payload = x.new_empty(self.nbytes(len(x)), dtype=torch.uint8) if out is None else out
        scales, elements = self._parts(payload, len(x))
        buffer = x.new_empty(min(len(x), max(piece, self.block)), dtype=torch.float32)
        noise = None
        if key:
            begin = crc32(key.encode()) % STARTS
            noise = weyl(max(piece, self.block), x.device)[begin : begin + len(buffer)]
        for start, stop, first, blocks in _pieces(len(x), self.block, piece):
            values, scaled = x[start:stop].view(blocks, -1).float(), buffer[: stop - start].view(blocks, -1)
            scale = torch.amax(torch.abs(values, out=scaled), 1, out=scales[first : first + blocks])
            torch.mul(values, scale.div_(self.largest).clamp_(min=LEAST).reciprocal().unsqueeze(1), out=scaled)
            if noise is not None:
                scaled.add_(noise[: stop - start].view(blocks, -1)).floor_()
            else:
                scaled.round_()
            elements[start:stop].view(blocks, -1).copy_(scaled)
        scales.masked_fill_(scales.isinf(), torch.nan)
        payload[payload.numel() - -len(x) % SCALE_BYTES :].zero_()
        return payload

    def decode(self, payload: Tensor, out: Tensor, *, add: bool = False, piece: int | None = None) -> Tensor:
        """Decode a payload into ``out``, or ``add`` its values to ``out``, which then must be float32."""
        flat, piece = out.view(-1), piece or piece_on(out.device)
        scales, elements = self._parts(payload, len(flat))
        buffer = flat.new_empty(min(len(flat), max(piece, self.block)), dtype=torch.float32)
        for start, stop, first, blocks in _pieces(len(flat), self.block, piece):
            part, scale = flat[start:stop].view(blocks, -1), scales[first : first + blocks].unsqueeze(1)
            values = buffer[: stop - start].view(blocks, -1).copy_(elements[start:stop].view(blocks, -1))
            if add:
                part.addcmul_(values, scale)
            elif out.dtype is torch.float32:
                torch.mul(values, scale, out=part)
            else:
                part.copy_(values.mul_(scale))
        return out

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        end = SCALE_BYTES * self.blocks(numel)
        return payload[:end].view(torch.float32), payload[end : end + numel].view(self.dtype)


def _pieces(numel: int, block: int, piece: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the start and stop of each piece, the index of its first block, and its number of blocks.

    A remainder shorter than a block is a piece of its own, with one block.
    """
    whole = numel // block
    step = max(piece // block, 1)
    for first in range(0, whole, step):
        blocks = min(step, whole - first)
        yield first * block, (first + blocks) * block, first, blocks
    if numel % block:
        yield whole * block, numel, whole, 1


@cache
def weyl(piece: int, device: torch.device) -> Tensor:
    """Return a Weyl sequence, long enough for a piece from any start. It is cached for the life of the process."""
    numbers = torch.arange(piece + STARTS, dtype=torch.float64, device=device)
    return numbers.mul_(GOLDEN).frac_().float().clamp_(max=BELOW_1)

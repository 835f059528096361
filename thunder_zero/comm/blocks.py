"""Writes tensors as bytes with a scale for each block, and reads them back.

::

    payload of n elements    [ scales, float32, one a block | n elements of a byte | padding to a multiple of 4 ]

    write   x (n,)           ->  payload         scale = max |x| of the block / 127;  element = x / scale, rounded
    read    payload          ->  x (n,)          element * scale;  added to what is there, if asked

This goes through pieces, which on a CPU stay in its cache; on a GPU most tensors are one piece. A block with Inf
or NaN has the scale NaN, so all of it arrives as NaN.

Dithered rounding is floor(x / scale + u), for u uniform in [0, 1): its mean is x / scale (Gray and Stockham, Dithered
quantizers, 1993). Here u is a Weyl sequence over the elements of a piece, which begins where a hash of the parameter,
the sender, and how often it was reduced says: free, the same in each run, and uniform over the hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from thunder_zero.plan.encoding import SCALE_BYTES, Encoding, Int8

PIECE = 1 << 19  # elements at a time on a CPU: buffers of 2 MiB stay in the cache, and operators cost little a piece
PIECE_ON_GPU = 1 << 22  # 16 MiB each: as many launches as such a tensor needs anyway
LEAST = torch.finfo(torch.float32).tiny  # of a scale: its inverse is finite
GOLDEN = 0.6180339887498949  # step of the Weyl sequence, the golden ratio's fractional part
STARTS = 1 << 16  # where the sequence can begin
BELOW_1 = 1 - 2**-13  # the largest number of the sequence: 127 and a few ulps, added to it, are less than 128


def write(encoding: Int8, x: Tensor, payload: Tensor, key: str = "", piece: int = PIECE) -> None:
    """Write the elements of ``x`` (n,), floating-point, into ``payload`` (``encoding.nbytes(n)``,), uint8. Round to
    nearest; with a ``key``, up or down at random by its hash. ``piece``: elements at a time."""
    scales, elements = _parts(encoding, payload, x.numel())
    buffer = x.new_empty(min(x.numel(), max(piece, encoding.block)), dtype=torch.float32)
    noise = None
    if key:
        begin = crc32(key.encode()) % STARTS
        noise = weyl(max(piece, encoding.block), x.device)[begin : begin + len(buffer)]
    for start, stop, at, blocks in _pieces(x.numel(), encoding.block, piece):
        values, scaled = x[start:stop].view(blocks, -1).float(), buffer[: stop - start].view(blocks, -1)
        scale = torch.amax(torch.abs(values, out=scaled), 1, out=scales[at : at + blocks])
        torch.mul(values, scale.div_(encoding.largest).clamp_(min=LEAST).reciprocal().unsqueeze(1), out=scaled)
        if noise is not None:
            scaled.add_(noise[: stop - start].view(blocks, -1)).floor_()
        else:
            scaled.round_()
        elements[start:stop].view(blocks, -1).copy_(scaled)
    scales.masked_fill_(scales.isinf(), torch.nan)
    payload[payload.numel() - _padding(x.numel()) :].zero_()


def read(encoding: Int8, payload: Tensor, out: Tensor, *, add: bool = False, piece: int = PIECE) -> None:
    """Read a payload into ``out`` (n,), floating-point, or ``add`` it to what is there, which is float32."""
    scales, elements = _parts(encoding, payload, out.numel())
    buffer = out.new_empty(min(out.numel(), max(piece, encoding.block)), dtype=torch.float32)
    for start, stop, at, blocks in _pieces(out.numel(), encoding.block, piece):
        part, scale = out[start:stop].view(blocks, -1), scales[at : at + blocks].unsqueeze(1)
        values = buffer[: stop - start].view(blocks, -1).copy_(elements[start:stop].view(blocks, -1))
        if add:
            part.addcmul_(values, scale)
        elif out.dtype is torch.float32:
            torch.mul(values, scale, out=part)
        else:
            part.copy_(values.mul_(scale))


def _parts(encoding: Encoding, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the scales and the elements of a payload, as views."""
    end = SCALE_BYTES * encoding.blocks(numel)
    return payload[:end].view(torch.float32), payload[end : end + numel].view(encoding.dtype)


def _padding(numel: int) -> int:
    return -numel % SCALE_BYTES


def _pieces(numel: int, block: int, piece: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield where pieces begin and end, the number of their first block, and how many they have. What is left at the
    end is a block of its own."""
    whole = numel // block
    step = max(piece // block, 1)
    for at in range(0, whole, step):
        blocks = min(step, whole - at)
        yield at * block, (at + blocks) * block, at, blocks
    if numel % block:
        yield whole * block, numel, whole, 1


@cache
def weyl(piece: int, device: torch.device) -> Tensor:
    """Return the sequence of a piece, whatever its start; it stays in the process."""
    numbers = torch.arange(piece + STARTS, dtype=torch.float64, device=device)
    return numbers.mul_(GOLDEN).frac_().float().clamp_(max=BELOW_1)

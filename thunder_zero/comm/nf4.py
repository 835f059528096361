"""Encodes rows of frozen parameters as 4-bit levels with a scale for each block, and decodes them.

::

    a row of n elements    [ scales, float32, one a block | two elements a byte, the first in its upper half | padding ]

    encode   x (rows, n)   ->  bytes (rows, NF4.nbytes(n))    scale = max |x| of the block; level nearest to x / scale
    decode   bytes         ->  x (rows, n)                    level * scale

Each row has its own blocks, so that the bytes of a row do not depend on how many ranks share the parameter. Levels and
order of elements are bitsandbytes', whose blocks run on from row to row. Encoding what was decoded, in the dtype of the
original, gives the same bytes: the largest of a block is its scale times 1 or -1, exactly. A block with Inf or NaN is
decoded as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from thunder_zero.comm.blocks import PIECE, PIECE_ON_GPU
from thunder_zero.plan.encoding import NF4, SCALE_BYTES

# Quantiles of a normal distribution, scaled to -1 and 1, with an exact 0 (Dettmers et al., QLoRA, 2023, appendix E).
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@torch.no_grad()
def encode(form: NF4, rows: Tensor) -> Tensor:
    """Return the bytes of rows (rows, ...), floating-point: (rows, bytes of a row), uint8."""
    width = prod(rows.shape[1:])
    flat, blocks = rows.detach().reshape(len(rows), width), form.blocks(width)
    found = torch.zeros(len(flat), form.nbytes(width), dtype=torch.uint8, device=flat.device)
    levels = torch.tensor(LEVELS, device=flat.device)
    borders = (levels[1:] + levels[:-1]) / 2
    for start, stop in _pieces(flat, None):
        values = torch.zeros(stop - start, blocks * form.block, device=flat.device)
        values[:, :width] = flat[start:stop]
        values = values.view(stop - start, blocks, form.block)
        scales = values.abs().amax(2)
        scales.masked_fill_(scales.isinf(), torch.nan)
        values /= scales.masked_fill(scales == 0, 1.0).unsqueeze(2)
        codes = torch.bucketize(values, borders, out_int32=True).to(torch.uint8).view(stop - start, -1, 2)
        found[start:stop].view(torch.float32)[:, :blocks] = scales
        _codes(form, found[start:stop], width).copy_(((codes[..., 0] << 4) | codes[..., 1])[:, : -(-width // 2)])
    return found


@torch.no_grad()
def decode(form: NF4, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, *, piece: int | None = None) -> Tensor:
    """Return the rows (rows, ...) that bytes stand for, given the shape of all rows of the parameter. ``piece``:
    elements at a time (default: by the device)."""
    out = payload.new_empty((len(payload), *shape[1:]), dtype=dtype)
    width = prod(shape[1:])
    flat = out.view(len(out), width)
    end = width // form.block * form.block
    pairs = pairs_on(payload.device)
    for start, stop in _pieces(flat, piece):
        codes = _codes(form, payload[start:stop], width)
        scales = payload[start:stop].view(torch.float32)[:, : form.blocks(width)]
        # One look-up a byte, which finds two levels.
        levels = pairs.index_select(0, codes.reshape(-1).int()).view(torch.float32).view(stop - start, -1)[:, :width]
        levels[:, :end].unflatten(1, (-1, form.block)).mul_(scales[:, : end // form.block].unsqueeze(2))
        levels[:, end:].mul_(scales[:, end // form.block :])
        flat[start:stop] = levels
    return out


def _codes(form: NF4, payload: Tensor, width: int) -> Tensor:
    """Return the bytes of rows that hold their elements, as a view."""
    begin = SCALE_BYTES * form.blocks(width)
    return payload[:, begin : begin + -(-width // 2)]


def _pieces(flat: Tensor, piece: int | None) -> Iterator[tuple[int, int]]:
    """Yield where pieces of rows begin and end: on a CPU they stay in its cache."""
    piece = piece or (PIECE if flat.device.type == "cpu" else PIECE_ON_GPU)
    step = max(piece // max(flat.shape[1], 1), 1)
    for start in range(0, len(flat), step):
        yield start, min(start + step, len(flat))


@cache
def pairs_on(device: torch.device) -> Tensor:
    """Return the two levels that each byte stands for, (256,), each pair in the memory of an int64; it stays in the
    process."""
    levels = torch.tensor(LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1).view(torch.int64).view(-1).to(device)

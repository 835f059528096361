"""A frozen parameter that comes encoded: on the meta device, with the bytes of its rows."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from thunder_zero.encodings.nf4 import NF4


class Stored(nn.Parameter):
    """A meta tensor of the full shape and dtype. ``payload`` has the encoded rows, uint8 of shape (rows, bytes)."""

    payload: Tensor
    format: NF4

    @classmethod
    def of(cls, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype, fmt: NF4) -> Stored:
        assert payload.shape == (shape[0], fmt.nbytes(prod(shape[1:]))), (payload.shape, shape, fmt)
        stored = cls(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        stored.payload, stored.format = payload, fmt
        return stored

    def decoded(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.payload.device)
        return self.format.decode(self.payload, out)

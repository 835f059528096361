"""Puts plain tensors together of which ranks along an axis have slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thunder_zero.spmd.error_shapes import is_close


class Slices(NamedTuple):
    """Ranks along the axis have slices of a tensor along one of its dimensions."""

    axis: str
    dim: int


def find_slices(values: Sequence[Tensor], whole: Tensor, axes: Mapping[str, int]) -> Slices | None:
    """Return how the ranks' values are slices of a tensor, or None if they are not."""
    shape = values[0].shape
    if shape == whole.shape or len(shape) != whole.ndim or any(value.shape != shape for value in values):
        return None
    differing = [dim for dim in range(whole.ndim) if shape[dim] != whole.shape[dim]]
    for axis, size in axes.items():
        if len(differing) == 1 and shape[differing[0]] * size == whole.shape[differing[0]]:
            slices = Slices(axis, differing[0])
            if all(is_close(value, whole) for value in put_together(values, slices, axes)):
                return slices
    return None


def put_together(values: Sequence[Tensor], slices: Slices | None, axes: Mapping[str, int]) -> list[Tensor]:
    """Return, for each rank, the concatenated slices of the ranks along the axis."""
    if slices is None:
        return [*values]
    ranks = torch.arange(len(values)).reshape(*axes.values())
    groups = ranks.movedim([*axes].index(slices.axis), -1).reshape(-1, axes[slices.axis])
    result = [*values]
    for group in groups.tolist():
        whole = torch.cat([values[rank] for rank in group], slices.dim)
        for rank in group:
            result[rank] = whole
    return result

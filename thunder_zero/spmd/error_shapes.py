"""Names the error of a value: a factor, one rank's share, rows in another order.

::

    true   got on rank 0, rank 1    sentence
    (4,)   (8,)        (8,)         2 times the true value: counted once on each rank of tp
    (4,)   (1,)        (3,)         one rank's share: the sum over tp is the true value; it is not reduced over tp
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = 1e-5  # relative; some models compute parts in float32


class Slices(NamedTuple):
    """Ranks along the axis have slices of a tensor along one of its dimensions."""

    axis: str
    dim: int


def find_slices(values: Sequence[Tensor], whole: Tensor, axes: Mapping[str, int]) -> Slices | None:
    """Return how the ranks' values are slices of a tensor, or None if they are not."""
    if whole.ndim == 0 or any(value.shape != values[0].shape for value in values):
        return None
    for slices in [Slices(axis, dim) for axis in axes for dim in range(whole.ndim)]:
        joined = join(values, slices, axes)
        if axes[slices.axis] > 1 and joined[0].shape == whole.shape and all(is_close(value, whole) for value in joined):
            return slices
    return None


def join(values: Sequence[Tensor], slices: Slices | None, axes: Mapping[str, int]) -> list[Tensor]:
    """Return, for each rank, the concatenated slices of the ranks along the axis."""
    if slices is None:
        return [*values]
    on_mesh = torch.stack([*values]).unflatten(0, [*axes.values()])
    axis = [*axes].index(slices.axis)
    joined = torch.cat(on_mesh.unbind(axis), len(axes) - 1 + slices.dim).unsqueeze(axis)
    return [*joined.expand(*axes.values(), *joined.shape[len(axes) :]).flatten(0, len(axes) - 1)]


def relative_error(value: Tensor, true: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the true value."""
    error, norm = float((value - true).norm()), float(true.norm())
    return error / norm if norm else float("inf") if error else 0.0


def is_close(value: Tensor, true: Tensor) -> bool:
    """Return whether a value is the true one but for rounding."""
    return relative_error(value, true) < TOLERANCE


def name_error(values: Sequence[Tensor], true: Tensor, axes: Mapping[str, int]) -> tuple[str, float | None]:
    """Return a sentence that names the error of wrong values, and a factor if the values are multiples of the true one.

    Args:
        values: the value on each rank, in row-major order of the mesh.
        true: the true value.
        axes: the sizes of the axes of the mesh.
    """
    if infinite := [rank for rank, value in enumerate(values) if not value.isfinite().all()]:
        return f"infinite or not a number on {on_ranks(infinite)}", None
    if not true.any():
        return "not zero, as the true value is", None
    value = values[0]
    if not all(is_close(other, value) for other in values):
        return _name_disagreement(torch.stack([*values]), true, axes), None
    if (factor := _factor(value, true)) is not None:
        return _name_factor(factor, axes), factor
    sentence = _name_order(value, true) or _name_rows(value, true, axes)
    return sentence or f"no multiple of the true value: relative error {relative_error(value, true):.2g}", None


def _factor(value: Tensor, true: Tensor) -> float | None:
    """Return the factor between a value and the true one, by least squares, or None if the value is no multiple."""
    factor = float((value * true).sum() / (true * true).sum())
    return factor if float((value - factor * true).norm()) < TOLERANCE * float(true.norm()) else None


def _name_factor(factor: float, axes: Mapping[str, int]) -> str:
    if abs(factor) < TOLERANCE:
        return "zero"
    if abs(factor + 1) < TOLERANCE:
        return "the true value with the wrong sign"
    times, part = round(factor), round(1 / factor)
    if times > 1 and abs(factor / times - 1) < TOLERANCE:
        where = ", or ".join(f"once on each rank of {names}" for names in _with_size(times, axes))
        return f"{times} times the true value{where and f': counted {where}'}"
    if part > 1 and abs(factor * part - 1) < TOLERANCE:
        where = ", or ".join(f"the size of {names}" for names in _with_size(part, axes))
        return f"1/{part} of the true value{where and f': divided by {where} once too often'}"
    return f"{factor:.6g} times the true value"


def _with_size(size: int, axes: Mapping[str, int]) -> list[str]:
    """Return the axes, or products of axes, that have this number of ranks."""
    return [" x ".join(names) for names in _subsets(axes) if prod(axes[name] for name in names) == size]


def _subsets(axes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of the axes with more than one rank, small subsets first."""
    names = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _name_order(value: Tensor, true: Tensor) -> str:
    """Name the error if the rows of a value are the true rows in another order; else return an empty string."""
    for dim in range(true.ndim):
        rows, true_rows = _rows(value, dim), _rows(true, dim)
        key = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype).sqrt()  # so that different rows have different keys
        if is_close(rows[(rows @ key).argsort()], true_rows[(true_rows @ key).argsort()]):
            return f"the true value with its rows along dimension {dim} in another order"
    return ""


def _name_rows(value: Tensor, true: Tensor, axes: Mapping[str, int]) -> str:
    """Name the error if some rows are right, as where one slice is wrong; else return an empty string."""
    for dim in range(true.ndim):
        rows, true_rows = _rows(value, dim), _rows(true, dim)
        is_wrong = (rows - true_rows).norm(dim=1) > TOLERANCE * float(true.norm()) / len(rows) ** 0.5
        if not is_wrong.all():
            wrong = is_wrong.nonzero().flatten().tolist()
            factor = _factor(rows[is_wrong], true_rows[is_wrong])
            what = "wrong" if factor is None else _name_factor(factor, axes)
            where = f"{wrong[0]} to {wrong[-1]}" if len(wrong) == wrong[-1] - wrong[0] + 1 else f"{len(wrong)}"
            return f"right but for rows {where} of {len(rows)} along dimension {dim}, which are {what}"
    return ""


def _name_disagreement(values: Tensor, true: Tensor, axes: Mapping[str, int]) -> str:
    """Name the error of values that differ between ranks. ``values`` has a dimension of ranks in front."""
    on_mesh = values.unflatten(0, [*axes.values()])
    for names in _subsets(axes):
        means = on_mesh.mean([index for index, name in enumerate(axes) if name in names]).reshape(-1, *true.shape)
        factor = _factor(means[0], true)
        if factor is not None and all(is_close(mean, means[0]) for mean in means) and abs(factor) > TOLERANCE:
            return _name_share(factor, " x ".join(names), prod(axes[name] for name in names), axes)
    if right := [rank for rank, value in enumerate(values) if is_close(value, true)]:
        wrong = [rank for rank in range(len(values)) if rank not in right]
        return f"ranks disagree: right on {on_ranks(right)}, wrong on {on_ranks(wrong)}"
    along = [name for dim, name in enumerate(axes) if not is_close(on_mesh, on_mesh.mean(dim, keepdim=True))]
    return f"ranks disagree along {', '.join(along)}: relative error {relative_error(values[0], true):.2g} on rank 0"


def _name_share(factor: float, names: str, count: int, axes: Mapping[str, int]) -> str:
    """Name values of which the mean over ``count`` ranks is a multiple of the true value."""
    if abs(factor - 1) < TOLERANCE:
        return f"one rank's own value: the mean over {names} is the true value; it is not averaged over {names}"
    if abs(factor * count - 1) < TOLERANCE:
        return f"one rank's share: the sum over {names} is the true value; it is not reduced over {names}"
    total = _name_factor(factor * count, axes)
    return f"one rank's share: it is not reduced over {names}, and the sum over {names} is {total}"


def on_ranks(ranks: Sequence[int]) -> str:
    """Return text such as ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

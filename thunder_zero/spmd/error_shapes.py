"""Names the error of a value: a factor, one rank's share, rows in another order.

::

    true   got on rank 0, rank 1    sentence
    (4,)   (8,)        (8,)         2 times the true value: counted on each rank of tp
    (4,)   (1,)        (3,)         one rank's share: the sum over tp is the true value; it is not reduced over tp
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

import torch
from torch import Tensor

CLOSE = 1e-4  # the relative error up to which a candidate explains a value


def relative_error(value: Tensor, true: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference divided by the norm of the true value, or by ``floor`` if that is larger."""
    error, norm = float((value - true).norm()), max(float(true.norm()), floor)
    return error / norm if norm else float("inf") if error else 0.0


def name_error(
    values: Sequence[Tensor], true: Tensor, axes: Mapping[str, int], *, is_bias: bool = False
) -> tuple[str, float | None]:
    """Return a sentence that names the error of wrong values, and a factor if the values are multiples of the true one.

    Args:
        values: the value on each rank, in row-major order of the mesh.
        true: the true value.
        axes: the sizes of the axes of the mesh.
        is_bias: whether the value is of a bias, which slices may add more than once.
    """
    if not all(bool(value.isfinite().all()) for value in values):
        ranks = [rank for rank, value in enumerate(values) if not value.isfinite().all()]
        return f"infinite or not a number on {on_ranks(ranks)}", None
    if not true.any():
        return "not zero, as the true value is", None
    if all(is_close(value, values[0]) for value in values):
        return _name_common_error(values[0], true, axes, is_bias)
    return _name_disagreement(torch.stack([*values]), true, axes), None


def is_close(value: Tensor, true: Tensor) -> bool:
    """Return whether a candidate explains a value."""
    return relative_error(value, true) < CLOSE


def _factor(value: Tensor, true: Tensor) -> float | None:
    """Return the factor between a value and the true one, by least squares, or None if the value is no multiple."""
    factor = float((value * true).sum() / (true * true).sum())
    return factor if float((value - factor * true).norm()) < CLOSE * float(true.norm()) else None


def _name_common_error(value: Tensor, true: Tensor, axes: Mapping[str, int], is_bias: bool) -> tuple[str, float | None]:
    """Name the error of a value on which all ranks agree."""
    if (factor := _factor(value, true)) is not None:
        return _name_factor(factor, axes, is_bias), factor
    for dim in range(true.ndim):
        if _is_permuted(value, true, dim):
            return f"the true value with its rows along dimension {dim} in another order", None
    for dim in range(true.ndim):
        if sentence := _name_rows(value, true, dim, axes):
            return sentence, None
    return f"no multiple of the true value: relative error {_error(value, true)}", None


def _error(value: Tensor, true: Tensor) -> str:
    return f"{relative_error(value, true):.2g}"


def _name_factor(factor: float, axes: Mapping[str, int], is_bias: bool = False) -> str:
    if abs(factor) < CLOSE:
        return "zero"
    if abs(factor + 1) < CLOSE:
        return "the true value with the wrong sign"
    times, part = round(factor), round(1 / factor)
    if times > 1 and abs(factor / times - 1) < CLOSE:
        counted = "a bias counted" if is_bias else "counted"
        where = _either(f"once on each rank of {name}" for name in _of_size(times, axes))
        return f"{times} times the true value{where and f': {counted} {where}'}"
    if part > 1 and abs(factor * part - 1) < CLOSE:
        where = _either(f"the size of {name}" for name in _of_size(part, axes))
        return f"1/{part} of the true value{where and f': divided by {where} once too often'}"
    return f"{factor:.6g} times the true value"


def _either(words: Iterator[str]) -> str:
    return ", or ".join(words)


def _of_size(size: int, axes: Mapping[str, int]) -> list[str]:
    """Return the axes, or products of axes, that have this number of ranks."""
    return [" x ".join(names) for names in _subsets(axes) if prod(axes[name] for name in names) == size]


def _subsets(axes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of the axes with more than one rank, small subsets first."""
    names = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _rows(tensor: Tensor, dim: int) -> Tensor:
    return tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)


def _is_permuted(value: Tensor, true: Tensor, dim: int) -> bool:
    """Return whether the rows of a value are the true rows in another order."""
    rows, true_rows = _rows(value, dim), _rows(true, dim)
    key = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype).sqrt()  # so that different rows have different keys
    ordered, true_ordered = (tensor[(tensor @ key).argsort()] for tensor in (rows, true_rows))
    return is_close(ordered, true_ordered)


def _name_rows(value: Tensor, true: Tensor, dim: int, axes: Mapping[str, int]) -> str:
    """Name the error if some rows are right, as where one slice is wrong; else return an empty string."""
    rows, true_rows = _rows(value, dim), _rows(true, dim)
    scale = CLOSE * float(true.norm()) / true.shape[dim] ** 0.5
    is_wrong = (rows - true_rows).norm(dim=1) > scale
    if is_wrong.all():
        return ""
    wrong = is_wrong.nonzero().flatten().tolist()
    factor = _factor(rows[is_wrong], true_rows[is_wrong])
    what = "wrong" if factor is None else _name_factor(factor, axes)
    where = f"{wrong[0]} to {wrong[-1]}" if len(wrong) == wrong[-1] - wrong[0] + 1 else f"{len(wrong)}"
    return f"right but for rows {where} of {len(rows)} along dimension {dim}, which are {what}"


def _name_disagreement(values: Tensor, true: Tensor, axes: Mapping[str, int]) -> str:
    """Name the error of values that differ between ranks. ``values`` has a dimension of ranks in front."""
    on_mesh = values.reshape(*axes.values(), *true.shape)
    for names in _subsets(axes):
        dims = [index for index, name in enumerate(axes) if name in names]
        means = on_mesh.mean(dims).reshape(-1, *true.shape)
        factor = _factor(means[0], true)
        if factor is not None and all(is_close(mean, means[0]) for mean in means) and abs(factor) > CLOSE:
            return _name_share(factor, " x ".join(names), prod(axes[name] for name in names), axes)
    right = [rank for rank, value in enumerate(values) if is_close(value, true)]
    if right:
        wrong = [rank for rank in range(len(values)) if rank not in right]
        return f"ranks disagree: right on {on_ranks(right)}, wrong on {on_ranks(wrong)}"
    along = [on_mesh.mean(dim, keepdim=True).expand_as(on_mesh) for dim in range(len(axes))]
    differing = [name for name, mean in zip(axes, along, strict=True) if not is_close(on_mesh, mean)]
    return f"ranks disagree along {', '.join(differing)}: relative error {_error(values[0], true)} on rank 0"


def _name_share(factor: float, names: str, count: int, axes: Mapping[str, int]) -> str:
    """Name values of which the mean over ``count`` ranks is a multiple of the true value."""
    if abs(factor - 1) < CLOSE:
        return f"one rank's own value: the mean over {names} is the true value; it is not averaged over {names}"
    if abs(factor * count - 1) < CLOSE:
        return f"one rank's share: the sum over {names} is the true value; it is not reduced over {names}"
    total = _name_factor(factor * count, axes)
    return f"one rank's share: it is not reduced over {names}, and the sum over {names} is {total}"


def on_ranks(ranks: Sequence[int]) -> str:
    """Return text such as ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

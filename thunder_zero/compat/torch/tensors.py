"""needed while: torch numbers storages, and divides many tensors at once, in private alone."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.compat.private import foreach_div_

IS_PARAM = "_is_param"  # the attribute by which torch knows a DTensor that is a parameter; no user set it


def storage_number(tensor: Tensor) -> int:
    """Return a number that tensors share while they share memory, also where tensors have no values."""
    number: int = tensor.untyped_storage()._cdata
    return number


def divide_all(tensors: tuple[Tensor, ...], divisor: float) -> None:
    """Divide tensors in place, in one call."""
    foreach_div_(tensors, divisor)

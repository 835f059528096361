"""needed while: torch marks parameters, and divides many tensors at once, in private alone."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.compat.private import foreach_div_

IS_PARAM = "_is_param"  # the attribute by which torch knows a DTensor that is a parameter; no user set it


def divide_all(tensors: tuple[Tensor, ...], divisor: float) -> None:
    """Divide tensors in place, in one call."""
    foreach_div_(tensors, divisor)

"""needed while: torch has no public API to mark parameters, or to divide many tensors at once."""

from __future__ import annotations

from torch import Tensor

from thunder_zero.compat.private import foreach_div_

IS_PARAM = "_is_param"  # torch's attribute that marks a DTensor as a parameter


def divide_all(tensors: tuple[Tensor, ...], divisor: float) -> None:
    """Divide tensors in place, in one call."""
    foreach_div_(tensors, divisor)

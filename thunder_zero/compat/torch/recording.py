"""Questions about the operator that runs: is it fake, of which forward; and works with values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from thunder_zero.compat.private import (
    create_work_from_future,
    current_autograd_node,
    fake_mode_key,
    get_dispatch_mode,
    get_sequence_nr,
    running_backward,
)

# needed while: torch has no public question whether operators run on shapes alone.


def fakes(types: Iterable[type]) -> bool:
    """Return whether an operator runs on tensors without values, as when DTensor plans a layout."""
    return any(kind.__name__ == "FakeTensor" for kind in types) or get_dispatch_mode(fake_mode_key) is not None


# needed while: torch has no public number that a backward's operator shares with its forward's.


def is_backward() -> bool:
    """Return whether a backward runs."""
    return bool(running_backward() != -1)


def next_sequence() -> int:
    """Return the number that autograd gives to the next operator of forward."""
    return int(get_sequence_nr())


def backward_sequence() -> int | None:
    """Return the number of the forward operator whose backward runs, or None outside of a backward."""
    node = current_autograd_node()
    return None if node is None else int(node._sequence_nr())


# needed while: works of torch's fake group have futures without values.


def with_arrived_works(result: Any, outputs: Sequence[Tensor]) -> Any:
    """Return the result of a collective with works that have arrived, and whose futures have its outputs."""

    def arrived(_: Any) -> Any:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([*outputs])
        return create_work_from_future(future).boxed()

    return tree_map_only(torch.ScriptObject, arrived, result)


# needed while: torch's grouped product, and what a GradScaler calls, have no kernels for float64.


def in_float64(operator: Any) -> Any:
    """Return a function that computes what an operator does in float64, too."""
    kernels: dict[Any, Any] = {
        torch.ops.aten._grouped_mm.default: _grouped_mm,
        torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    }
    return kernels.get(operator, operator)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    for grad in grads:
        grad.mul_(inv_scale)
        found_inf.copy_(torch.maximum(found_inf, (~grad.isfinite().all()).to(found_inf.dtype)))


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Multiply each group of rows, columns or inner elements; ``offs`` has the ends of the groups."""
    if offs is None:
        return a @ b
    ends = [0, *offs.tolist()]
    groups = [slice(start, end) for start, end in pairwise(ends)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, group] @ b[group] for group in groups])
    if a.dim() == 2:
        rest = a.new_zeros(len(a) - ends[-1], b.shape[-1])
        return torch.cat([*(a[group] @ item for group, item in zip(groups, b, strict=True)), rest])
    rest = a.new_zeros(a.shape[-2], b.shape[-1] - ends[-1])
    return torch.cat([*(item @ b[:, group] for group, item in zip(groups, a, strict=True)), rest], 1)

"""Placeholders of tensor-parallel parameters: DTensors for dynamo, slices for dynamo's graph.

As in torch's tensor parallelism, code that dynamo captures must compute with DTensors. Programs compute with a slice as
with a plain parameter::

    module.up.weight    DTensor (16, 8), Shard(0)      at rest: rows, on the whole mesh
                        DTensor (16, 8), Shard(0)      while forward runs: no values, on the mesh of slices
    graph's input       Placeholder (8, 8)             the graph's first lines build a DTensor from it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_iter

from thunder_zero.compat.private import DTensorSpec
from thunder_zero.sharded.dtensors import as_dtensor, contiguous, local
from thunder_zero.sharded.placeholders import (
    Placeholder,
    ValuesNeeded,
    cannot_use,
    hook_message,
    without_memory,
)


class _SliceWithoutValues(Tensor):
    """The local tensor of a placeholder that is a DTensor."""

    path: str  # the path of the parameter

    @classmethod
    @torch.compiler.disable  # or dynamo would report that it ends a graph
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, _SliceWithoutValues))
        raise ValuesNeeded(cannot_use(str(func), part.path), part.path)


def placeholder_of(path: str, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return the placeholder of a parameter. For a DTensor, return a DTensor without memory, with equal placements."""
    if not isinstance(param, DTensor):
        stand_in = without_memory(Placeholder, param, dtype, device)
        vars(stand_in).update(vars(param), path=path)
        return stand_in
    rows = without_memory(_SliceWithoutValues, local(param), dtype, device)
    rows.path = path
    spec = DTensorSpec(param.device_mesh, param.placements, contiguous(tuple(param.shape), dtype))
    dtensor: Any = DTensor.__new__(DTensor, rows, spec, requires_grad=param.requires_grad)
    vars(dtensor).update(vars(param))  # including the attribute that marks a parameter
    return cast(nn.Parameter, dtensor)


def as_slice(values: Tensor, stand_in: Tensor) -> Tensor:
    """Return local values as a DTensor that is placed as a placeholder, or unchanged if the placeholder is plain."""
    if not isinstance(stand_in, DTensor):
        return values
    whole = contiguous(tuple(stand_in.shape), values.dtype)
    return as_dtensor(values, DTensorSpec(stand_in.device_mesh, stand_in.placements, whole))


def path_of(value: object) -> str | None:
    """Return the path of the parameter that a placeholder stands for; None for any other value."""
    if isinstance(value, Placeholder):
        return value.path
    part = local(value) if isinstance(value, DTensor) else None
    return part.path if isinstance(part, _SliceWithoutValues) else None


def slice_of(value: object) -> tuple[Placeholder, Callable[..., DTensor], tuple[Any, ...]] | None:
    """Return what replaces a graph's input; None if the input is not a DTensor placeholder.

    The new input is a placeholder with the shape of this rank's slice. A function builds the DTensor from it and
    further arguments, on which the graph is specialised. torch redistributes the DTensor's gradient to the parameter's
    placements. This also reduces partial gradients, such as those of sequence parallelism.
    """
    if not isinstance(value, DTensor) or (path := path_of(value)) is None:
        return None
    taken = without_memory(Placeholder, local(value), value.dtype, value.device, value.requires_grad)
    taken.path, mesh, stride = path, value.device_mesh, value.stride()

    def whole_of_slice(rows: Tensor, placements: Any, shape: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return taken, whole_of_slice, (value.placements, tuple(value.shape))


def is_part(value: object) -> bool:
    """Return whether a value is a DTensor whose local tensors differ between ranks."""
    return isinstance(value, DTensor) and any(not isinstance(placement, Replicate) for placement in value.placements)


def require_unhooked(placeholders: Iterable[Tensor]) -> None:
    """Raise RuntimeError if forward has registered hooks on a placeholder, as Hugging Face's plans may do."""
    for tensor in placeholders:
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise RuntimeError(hook_message(path_of(tensor) or ""))


def require_plain_tensors(module: nn.Module) -> None:
    """Raise RuntimeError if a parameter is a DTensor, since tracing a DTensor needs its mesh."""
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor, and a trace without a mesh does not know which dimension slices it; "
                f"give mesh=, as to tz.compile"
            )

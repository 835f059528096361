"""Placeholders of parameters that are slices: DTensors for dynamo, slices for its graph.

Code that dynamo captures must compute with DTensors, as torch's tensor parallelism does. Programs compute with slices,
as if each were a parameter::

    module.up.weight    DTensor (16, 8), Shard(0)      at rest, of rows; on the whole mesh
                        DTensor (16, 8), Shard(0)      while forward runs: without values, on the mesh of slices
    graph's input       Placeholder (8, 8)             of which the graph's first lines make a DTensor
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_iter

from thunder_zero.compat.private import DTensorSpec
from thunder_zero.sharded.dtensors import contiguous, has_hooks, local
from thunder_zero.sharded.placeholders import Placeholder, ValuesNeeded, cannot_use, placeholder, without_memory


class _SliceWithoutValues(Tensor):
    """The local tensor of a DTensor that stands for a parameter."""

    path: str  # of the parameter

    @classmethod
    @torch.compiler.disable  # or dynamo would report that it ends a graph
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = next(leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, _SliceWithoutValues))
        raise ValuesNeeded(cannot_use(str(func), part.path), part.path)


def placeholder_of(path: str, param: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return the placeholder of a parameter. The placeholder of a DTensor is a DTensor on the same mesh, placed alike,
    without memory."""
    if not isinstance(param, DTensor):
        return placeholder(path, param, dtype, device)
    rows = without_memory(_SliceWithoutValues, local(param), dtype, device)
    rows.path = path
    spec = DTensorSpec(param.device_mesh, param.placements, contiguous(tuple(param.shape), dtype))
    stand_in: Any = DTensor.__new__(DTensor, rows, spec, requires_grad=param.requires_grad)
    vars(stand_in).update(vars(param))  # among them the attribute by which torch knows a parameter
    return cast(nn.Parameter, stand_in)


def path_of(value: object) -> str | None:
    """Return the path of the parameter that a placeholder stands for; None for any other value."""
    if isinstance(value, Placeholder):
        return value.path
    part = local(value) if isinstance(value, DTensor) else None
    return part.path if isinstance(part, _SliceWithoutValues) else None


@dataclass(frozen=True)
class Slice:
    """What a graph takes in the place of a placeholder that is a DTensor.

    Torch brings the gradient of the DTensor to the placements of the parameter. A gradient that each rank has computed
    from its part of a sequence is reduced that way.

    Attributes:
        taken: looks like the slice that this rank computes with.
        whole: makes the DTensor of the slice and of ``args``.
        args: the placements and the shape. Inputs that differ in them need different graphs.
    """

    taken: Placeholder
    whole: Callable[..., DTensor]
    args: tuple[Any, ...]


def slice_of(value: object) -> Slice | None:
    """Return what a graph takes in the place of an input; None if the input is not a DTensor that stands for a
    parameter."""
    if not isinstance(value, DTensor) or (path := path_of(value)) is None:
        return None
    taken = without_memory(Placeholder, local(value), value.dtype, value.device, value.requires_grad)
    taken.path, mesh, stride = path, value.device_mesh, value.stride()

    def whole_of_slice(rows: Tensor, placements: Any, shape: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return Slice(taken, whole_of_slice, (value.placements, tuple(value.shape)))


def is_part(value: object) -> bool:
    """Return whether a value is a DTensor whose parts differ between ranks."""
    return isinstance(value, DTensor) and any(not isinstance(placed, Replicate) for placed in value.placements)


def require_unhooked(placeholders: Mapping[str, Tensor]) -> None:
    """Refuse hooks that forward has put on placeholders, as plans of Hugging Face for tensor parallelism do.

    Raises:
        RuntimeError: naming the first parameter that has one.
    """
    for path, tensor in placeholders.items():
        if has_hooks(tensor):
            raise RuntimeError(
                f"forward registers a hook on the gradient of parameter {path!r}, which backward does not make there; "
                f"place the parameter's module by torch's SequenceParallel, whose gradient is reduced without a hook"
            )


def require_plain_tensors(module: nn.Module) -> None:
    """Refuse a module with DTensors: a program for it needs its mesh.

    Raises:
        RuntimeError: naming the first one.
    """
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise RuntimeError(
                f"parameter {name!r} is a DTensor, and a trace without a mesh does not know which dimension slices it; "
                f"give mesh=, as to tz.compile"
            )

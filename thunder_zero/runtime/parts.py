"""This rank's part of tensors that are laid out as a parameter is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from thunder_zero.runtime.dtensors import as_dtensor, contiguous, local


def part_of(full: Tensor, param: Tensor) -> Tensor:
    """A copy of this rank's part of a full tensor of a parameter's shape; the tensor, if the parameter has no parts, or
    if it is a DTensor itself. Only the part is on the parameter's device; not a collective."""
    if not isinstance(param, DTensor) or isinstance(full, DTensor):
        return full
    (chunk,) = param.__create_chunk_list__()
    rows = full.detach()
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        rows = rows.narrow(dimension, offset, size)
    return dtensor_like(rows.to(local(param).device, copy=True).contiguous(), param, full.shape)


def parts_of(full: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of full tensors as this rank's of the same model has them.

    Args:
        full: by name; names that ``own`` does not have stay as they are.
        own: this rank's.

    Raises:
        ValueError: a tensor has another shape.
    """
    parts = dict(full)
    for name, value in full.items():
        if not isinstance(like := own.get(name), Tensor):
            continue
        if value.shape != like.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(value.shape)} in the state dict and {tuple(like.shape)} in the model; load "
                f"the state dict of this model"
            )
        parts[name] = part_of(value, like)
    return parts


def dtensor_like(rows: Tensor, param: DTensor, shape: torch.Size) -> Tensor:
    """A DTensor of a full shape and of this rank's rows, which stay where they are, placed as a parameter is."""
    return as_dtensor(rows, DTensorSpec(param.device_mesh, param.placements, contiguous(shape, rows.dtype)))

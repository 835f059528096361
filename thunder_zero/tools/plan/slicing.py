"""Slices a meta copy of a module with torch's tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

Slicing = Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object]


def sliced_copy(module: nn.Module, mesh: DeviceMesh, slicing: Slicing) -> nn.Module:
    """Return a copy of the module on the meta device, sliced over a one-dimensional mesh."""
    tensors = chain(module.parameters(), module.buffers())
    memo: dict[int, Any] = {id(tensor): _without_values(tensor) for tensor in tensors}
    copy = deepcopy(module, memo)
    if callable(slicing):
        slicing(copy, mesh)
    else:
        parallelize_module(copy, mesh, dict(slicing))
    return copy


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

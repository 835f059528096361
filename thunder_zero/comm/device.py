"""Chooses the device of the shards, and refuses what the process group cannot carry."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from thunder_zero.comm.backends import transport_for
from thunder_zero.comm.group import Ranks
from thunder_zero.plan import Plan


def device_for(module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device | None) -> torch.device:
    """Where the shards will live: ``device``, or where the first parameter is that is not on the meta device.

    Where all are: on the CPU, as what is built without a device, or on the current device that the group carries.

    Raises:
        ValueError: parameters that cannot be sharded or whose gradients cannot be reduced, a device that is not there
            or that the group has no backend for, ``broadcast_from`` that is not a rank of the group.
    """
    for param in plan.params:
        if isinstance(module.get_parameter(param.path), DTensor):
            raise ValueError(
                f"parameter {param.path!r} is a DTensor, so torch shards it already (fully_shard, tensor parallelism); "
                f"give a module of plain tensors"
            )
    source = plan.policy.broadcast_from
    if source is not None and source >= plan.ranks:
        raise ValueError(f"broadcast_from is {source}; the process group has ranks 0 to {plan.ranks - 1}")
    originals = (module.get_parameter(param.path) for param in plan.params)
    real = (original.device for original in originals if not original.is_meta)
    device = device or next(real, _home(ranks.everyone))
    reduced = transport_for(ranks.everyone, device).averages
    for param in plan.params:
        if param.requires_grad and param.reduce_dtype not in reduced:
            raise ValueError(
                f"the gradient of parameter {param.path!r} would be reduced in {param.reduce_dtype}, which the backend "
                f"cannot add up; give mixed_precision with reduce_dtype=torch.float32, or freeze the parameter"
            )
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is '{device}', which cannot be used here ({reason}); give one that is there"
        ) from None


def _home(group: dist.ProcessGroup) -> torch.device:
    """The CPU, unless the group carries none of its tensors."""
    carried = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in carried else carried[0])

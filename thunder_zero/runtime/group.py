"""Which ranks share a model, and on which device; what cannot be sharded is refused here."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from thunder_zero.plan import Plan
from thunder_zero.runtime.transport import transport_for


def process_group(group: object) -> dist.ProcessGroup:
    """The group that was given, or the default one.

    Raises:
        RuntimeError: there is neither.
        ValueError: this rank is not in the group.
        TypeError: not a process group.
    """
    if group is not None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # an int, which new_group returns on the other ranks
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process_group that it was given; transform the module only on "
                f"the ranks that torch.distributed.new_group was given"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group is {group!r}, a {type(group).__name__}; give a torch.distributed.ProcessGroup "
                f"(of a DeviceMesh: mesh.get_group()), or None for the default group"
            )
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group (under torchrun) before the "
            "transform, or pass process_group"
        )
    default = dist.group.WORLD
    assert default is not None, "it is initialised"
    return default


def device_for(module: nn.Module, plan: Plan, group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """Where the shards will live: ``device``, or where the first parameter is that is not on the meta device.

    Where all are: on the CPU, as what is built without a device, or on the current device that the group carries.

    Raises:
        ValueError: parameters that cannot be sharded, a device that is not there or that the group has no backend
            for, ``broadcast_from`` that is not a rank of the group.
    """
    for param in plan.params:
        if isinstance(module.get_parameter(param.path), DTensor):
            raise ValueError(
                f"parameter {param.path!r} is a DTensor, so torch shards it already (fully_shard, tensor parallelism); "
                f"give a module of plain tensors"
            )
    source = plan.policy.broadcast_from
    if source is not None and source >= group.size():
        raise ValueError(f"broadcast_from is {source}; the process group has ranks 0 to {group.size() - 1}")
    originals = (module.get_parameter(param.path) for param in plan.params)
    device = device or next((original.device for original in originals if not original.is_meta), _home(group))
    transport_for(group, device)
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

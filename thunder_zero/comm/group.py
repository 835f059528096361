"""Which ranks share a model, and on which device; what cannot be sharded is refused here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from thunder_zero.comm.transport import adds_up, transport_for
from thunder_zero.plan import Plan


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who trains a model together.

    Attributes:
        everyone: all ranks that do.
        inside: those among which one copy of the model is sharded, this rank's.
        across: those that hold the same rows as this rank, of other copies; None if there is one copy.
    """

    everyone: dist.ProcessGroup
    inside: dist.ProcessGroup
    across: dist.ProcessGroup | None

    @property
    def replicas(self) -> int:
        """How many copies of the model there are."""
        return 1 if self.across is None else self.across.size()


def ranks_of(group: object, mesh: object) -> Ranks:
    """Who trains together, by the process group or the mesh that was given, or the default group.

    A mesh of one dimension shards over it, one of two (replicate, shard) over the second. A collective of its ranks,
    where a mesh is not all ranks.

    Raises:
        RuntimeError: there is no process group.
        ValueError: this rank is not in the group or in the mesh; both are given; a mesh of more dimensions.
        TypeError: not a process group; not a mesh.
    """
    if mesh is None:
        alone = process_group(group)
        return Ranks(alone, alone, None)
    if group is not None:
        raise ValueError("process_group and mesh are both given; give one of them, a mesh has its process groups")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {mesh!r}, a {type(mesh).__name__}; give a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.mesh.shape)}; give one (shard) or two "
            f"(replicate, shard) of them, such as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}; transform the module "
            f"only on the ranks of the mesh"
        )
    several = mesh.ndim == 2 and mesh.size(0) > 1
    return Ranks(_all_of(mesh), mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if several else None)


def hybrid_mesh(shape: tuple[int, int], device: torch.device) -> DeviceMesh:
    """All ranks as so many copies of so many ranks; a collective."""
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _all_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The default group where the mesh is all ranks, so that one that was given another mesh is heard."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return process_group(None)
    return process_group(dist.new_group(ranks, use_local_synchronization=True))


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
    reduced = adds_up(transport_for(ranks.everyone, device))
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

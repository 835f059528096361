"""Which ranks share a model, and on which device; what cannot be sharded is refused here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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

"""Finds the process groups of a model from ``process_group`` or ``mesh``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thunder_zero.comm.lost_ranks import timeout_of
from thunder_zero.comm.places import without_places


@dataclass(frozen=True, slots=True)
class Ranks:
    """The process groups of a model.

    Attributes:
        everyone: all ranks that train it.
        inside: the ranks that share this rank's copy of the model.
        across: the ranks that hold the same rows as this one in each copy; None if there is one copy.
    """

    everyone: dist.ProcessGroup
    inside: dist.ProcessGroup
    across: dist.ProcessGroup | None

    @property
    def replicas(self) -> int:
        """The number of copies of the model."""
        return 1 if self.across is None else self.across.size()


def ranks_of(group: object, mesh: object) -> Ranks:
    """The process groups of a model from the given process group, the given mesh, or the default group.

    A mesh of one dimension shards over it, a mesh of two (replicate, shard) over the second. If the mesh leaves out
    ranks, this is a collective of the ranks in it.

    Raises:
        RuntimeError: there is no process group.
        ValueError: this rank is not in the group or in the mesh; both are given; the mesh has more dimensions.
        TypeError: not a process group; not a mesh.
    """
    if mesh is None:
        alone = process_group(group)
        return Ranks(alone, alone, None)
    if group is not None:
        raise ValueError(
            "process_group and mesh are both given; give only one of them (a mesh has its own process groups)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {mesh!r}, a {type(mesh).__name__}; give a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.mesh.shape)}; give one dimension "
            f"(shard) or two (replicate, shard), such as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}; transform the module "
            f"only on the ranks of the mesh"
        )
    several = mesh.ndim == 2 and mesh.size(0) > 1
    return Ranks(_all_of(mesh), mesh.get_group(mesh.ndim - 1), mesh.get_group(0) if several else None)


def hybrid_mesh(shape: tuple[int, int], device: torch.device) -> DeviceMesh:
    """A mesh of all ranks, ``shape`` = (copies, ranks of each copy); a collective."""
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def group_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new gloo group of the same ranks, with the timeout that ``group`` has on ``device``; a collective of them.

    For collectives of another thread, which must not mix with those of ``group``: they are no places.
    """
    ranks = dist.get_process_group_ranks(group)
    like = process_group(dist.new_group(ranks, timeout_of(group, device), "gloo", use_local_synchronization=True))
    without_places(like)
    return like


def _all_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of the mesh's ranks: the default one if it has all, so that a rank with another mesh can still object."""
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return process_group(None)
    return process_group(dist.new_group(ranks, use_local_synchronization=True))


def process_group(group: object) -> dist.ProcessGroup:
    """The given group, or the default one.

    Raises:
        RuntimeError: there is neither.
        ValueError: this rank is not in the group.
        TypeError: not a process group.
    """
    if group is not None:
        if group == dist.GroupMember.NON_GROUP_MEMBER:  # an int, which new_group returns on the other ranks
            raise ValueError(
                f"rank {dist.get_rank()} is not in the given process_group; transform the module only on the ranks of "
                f"that group"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group is {group!r}, a {type(group).__name__}; give a torch.distributed.ProcessGroup "
                f"(for a DeviceMesh: mesh.get_group()), or None for the default group"
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

"""Finds the process groups of a model; destroys process groups after an error.

On rank 2 of four::

    argument                                            process groups
    process_group, or neither argument                  shard_group {0 1 2 3}
    mesh [[0, 1], [2, 3]] of (dp_replicate, dp_shard)   shard_group {2 3}, replicate_group {0 2}
    mesh [[0, 1], [2, 3]] of (dp, tp)                   shard_group {0 2}, tensor {2 3}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims

from thunder_zero.comm.collective_tags import without_tags
from thunder_zero.comm.lost_ranks import naming_lost_ranks
from thunder_zero.compat.private import c10d_world, set_pg_timeout
from thunder_zero.compat.torch.groups import restarts_on_one_store, timeout_of
from thunder_zero.plan.mesh import Mesh

DATA_DIMS = (("dp_replicate", "dp_shard"), ("dp_shard",), ("dp",))  # names of the dimensions for data parallelism
LONGEST_WAIT_FOR_ADDRESS = timedelta(minutes=1)  # while a group is created, gloo does not notice a dead rank
GLOO_CONNECT_FACTOR = 5  # gloo waits for a connection five times as long as for a message


@dataclass(frozen=True, slots=True)
class Ranks:
    world: dist.ProcessGroup  # all ranks that train the model
    data: dist.ProcessGroup  # the ranks that hold this rank's slices; ``world`` without tensor parallelism
    shard_group: dist.ProcessGroup  # the ranks that share this rank's replica
    replicate_group: dist.ProcessGroup | None  # the ranks that hold this rank's rows, one in each replica
    first_copy: tuple[int, ...]  # the ranks of ``world`` that share the first replica, in the order of their rows
    mesh: DeviceMesh | None = None  # the user's mesh of all ranks. Its last dimension is ``shard_group`` or ``tensor``.
    tensor: DeviceMesh | None = None  # the ranks among which torch slices parameters

    @property
    def planned(self) -> Mesh:
        replicas, copy = (1, 0) if (copies := self.replicate_group) is None else (copies.size(), copies.rank())
        slices, part = (None, 0) if self.tensor is None else (self.tensor.size(), self.tensor.get_local_rank())
        mesh = Mesh.of(self.shard_group.size(), self.shard_group.rank(), replicas, copy=copy, slices=slices, part=part)
        if self.tensor is None:
            return mesh
        ranks = dist.get_process_group_ranks(self.tensor.get_group())
        # A DTensor's mesh may have another group of these ranks.
        groups = (group for group in c10d_world.pg_map if dist.get_process_group_ranks(group) == ranks)
        return replace(mesh, slice_groups=frozenset(group.group_name for group in groups))


def ranks_of(group: object, mesh: object, dims: object = None) -> Ranks:
    """Return the process groups of a model, from the mesh, the process group, or the default group.

    ``dims`` (FSDP2's ``dp_mesh_dims``) or :data:`DATA_DIMS` name the data dimensions; any other dimension is for tensor
    parallelism. If the mesh leaves out ranks, this is a collective of the mesh's ranks.
    """
    if (restarts := restarts_on_one_store()) and os.environ.get("RANK") == "0":
        warnings.warn(
            f"torchrun may restart the ranks {restarts} times, and restarted ranks may fail, because they find the "
            f"addresses of dead ranks in torchrun's store; start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            f"environment, and without --master-addr",
            stacklevel=2,
        )
    if mesh is None:
        if dims is not None:
            raise ValueError("dp_mesh_dims is given without a mesh; give the mesh whose dimensions it names")
        world = process_group(group)
        return Ranks(world, world, world, None, tuple(range(world.size())))
    if group is not None:
        raise ValueError(
            "process_group and mesh are both given; give only one of them (a mesh has its own process groups)"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is {mesh!r}, a {type(mesh).__name__}; give a torch.distributed.device_mesh.DeviceMesh")
    names = mesh.mesh_dim_names or ()
    data = _data_dims(names, dims)
    is_sliced = data not in ((), names)
    if is_sliced and names[:-1] != data:
        raise ValueError(
            f"mesh has the dimensions {names}, of which {' and '.join(map(repr, data))} are data parallel; give those "
            f"first, the one that shards last among them, and behind them one dimension for tensor parallelism"
        )
    if mesh.ndim > 2 and not is_sliced:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or tuple(mesh.mesh.shape)}; give one dimension "
            f"(shard) or two (replicate, shard), such as mesh['replicate', 'shard']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the mesh of ranks {mesh.mesh.flatten().tolist()}; transform the module "
            f"only on the ranks of the mesh"
        )
    shard_dim = mesh.ndim - 1 - is_sliced
    copies = mesh.mesh.view(-1, prod(mesh.mesh.shape[shard_dim:])).tolist()
    if is_sliced and (ranks := mesh.mesh.flatten().tolist()) != sorted(ranks):
        raise ValueError(f"mesh is {mesh.mesh.tolist()}; give its ranks in ascending order")
    _require_matching_rows(copies)
    world = _all_of(mesh)
    first_copy = tuple(dist.get_group_rank(world, rank) for rank in sorted(copies[0]))
    shard_group, replicate_group = mesh.get_group(shard_dim), mesh.get_group(0) if len(copies) > 1 else None
    if not is_sliced:
        return Ranks(world, world, shard_group, replicate_group, first_copy, _with_sorted_rows(mesh))
    data_group = _all_of(mesh[data]) if len(data) > 1 else shard_group
    return Ranks(world, data_group, shard_group, replicate_group, first_copy, mesh, mesh[names[-1]])


def _data_dims(names: tuple[str, ...], dims: object) -> tuple[str, ...]:
    """Return the names of a mesh's data dimensions, with the sharding dimension last; empty if none is known."""
    if dims is None:
        return next((candidate for candidate in DATA_DIMS if {*candidate} <= {*names}), ())
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(
            f"dp_mesh_dims is {dims!r}; give a torch.distributed.fsdp.DataParallelMeshDims, such as one of shard='dp'"
        )
    if len(dims.shard_names) != 1 or len(dims.replicate_names) > 1:
        raise ValueError(f"dp_mesh_dims is {dims}; name one dimension that shards, and one that replicates or none")
    data = (*dims.replicate_names, *dims.shard_names)
    if missing := [name for name in data if name not in names]:
        raise ValueError(f"dp_mesh_dims names {missing[0]!r}, and the mesh has {names}; give names of its dimensions")
    return data


def _with_sorted_rows(mesh: DeviceMesh) -> DeviceMesh:
    rows = mesh.mesh.sort(dim=-1).values
    if rows.equal(mesh.mesh):
        return mesh
    groups = mesh.get_all_groups()
    group = groups[0] if len(groups) == 1 else groups
    return DeviceMesh.from_group(group, mesh.device_type, rows, mesh_dim_names=mesh.mesh_dim_names)


def _require_matching_rows(copies: list[list[int]]) -> None:
    """Raise ValueError if a column of the mesh joins ranks that store different rows of parameters."""
    columns = {frozenset(column) for column in zip(*copies, strict=True)}
    sorted_columns = {frozenset(column) for column in zip(*map(sorted, copies), strict=True)}
    if columns != sorted_columns:
        raise ValueError(
            f"mesh is {copies}: torch numbers the ranks of a process group in ascending order, so the ranks of a "
            f"column would hold different rows; sort the ranks in each row of the mesh: {[*map(sorted, copies)]}"
        )


def hybrid_mesh(shape: tuple[int, int], device: torch.device) -> DeviceMesh:
    """Create a mesh of all ranks; a collective. ``shape`` is (number of replicas, number of ranks in each replica)."""
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def group_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Create a gloo group for another thread, without tags; a collective of the ranks of ``group``.

    Call it right after another collective: it raises if a rank calls it more than a minute after another rank does.
    """
    ranks, timeout = dist.get_process_group_ranks(group), timeout_of(group, device)
    creation_timeout = min(timeout / GLOO_CONNECT_FACTOR, LONGEST_WAIT_FOR_ADDRESS)
    with naming_lost_ranks(group):
        new_group = process_group(dist.new_group(ranks, creation_timeout, "gloo", use_local_synchronization=True))
    set_pg_timeout(timeout, new_group)
    without_tags(new_group)
    return new_group


def _all_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return a group of the mesh's ranks: if possible the default, in which ranks can compare different meshes."""
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return process_group(None)
    return process_group(dist.new_group(ranks, use_local_synchronization=True))


def has_groups() -> bool:
    return dist.is_available() and dist.is_initialized()


def uncaught() -> BaseException | None:
    error: BaseException | None = vars(sys).get("last_value")
    return error


def tell_launcher() -> None:
    """Let torchrun's summary of the failure end with the message of an uncaught exception; called at exit."""
    error = uncaught()
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if error is None or not file.name or file.exists():  # torch's own `record` has written it
        return
    sentence = "".join(traceback.format_exception_only(error)).strip()
    with suppress(OSError):  # later exit handlers matter more
        file.write_text(json.dumps({"message": sentence, "timestamp": str(int(time.time()))}))


def destroy_groups_after_error() -> None:
    """Destroy process groups after an uncaught exception, if no group uses a backend other than gloo; called at exit.

    Torch joins a group's threads when the last reference to the group is dropped, which is too late once the
    interpreter ends. A thread that still has to drop tensors would then wait for the GIL forever, and the process would
    abort instead of ending with the exception's exit code. The traceback's frames refer to the group, too.
    """
    error = uncaught()
    configs = ",".join(map(dist.get_backend_config, c10d_world.pg_map)) if has_groups() else ""
    if error is None or {pair.partition(":")[2] for pair in configs.split(",")} != {"gloo"}:
        return
    dist.destroy_process_group()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()  # an unfinished model is part of a reference cycle


def process_group(group: object) -> dist.ProcessGroup:
    """Return the given group, or the default group if it is None."""
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
    if not has_groups():
        raise RuntimeError(
            "there is no process group; call torch.distributed.init_process_group (under torchrun) before the "
            "transform, or pass process_group"
        )
    default = dist.group.WORLD
    assert default is not None, "it is initialised"
    return default

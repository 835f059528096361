"""Chooses the device and the transport of a model; raises if its group cannot reduce a gradient."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from thunder_zero.comm.collective_tags import TaggedTransport, is_debugging
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.lost_ranks import CPU, speaks_gloo
from thunder_zero.comm.native import CoalescedNccl, PerTensor
from thunder_zero.comm.pairwise import PairwiseGloo
from thunder_zero.comm.small_collectives import all_gather_object
from thunder_zero.comm.transport import SingleRank, Transport
from thunder_zero.compat.torch.groups import let_gloo_wait_for_a_core
from thunder_zero.plan.mesh import ALL, REPLICATE, SHARD, TENSOR
from thunder_zero.plan.params import Plan

Make = Callable[[ProcessGroup, int], Transport]
# (device type, backend) -> transport; other pairs get PerTensor
BACKENDS: Mapping[tuple[str, str], Make] = {
    ("cpu", "gloo"): PairwiseGloo,  # gloo's own reduce-scatter sends twice as many bytes as needed
    ("cuda", "nccl"): CoalescedNccl,  # one launch per bucket, the mean inside the collective
    ("cuda", "fake"): CoalescedNccl,  # replaces NCCL in tests: equal kernels and memory, no peers
}


def transport_for(group: ProcessGroup, device: torch.device, role: int = 0, make: Make | None = None) -> Transport:
    """Return the transport for tensors on ``device``. Transports that share a group must have different roles."""
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":", 1) for pair in config.split(",")).get(device.type)
    if backend is None:
        raise ValueError(
            f"the process group's backend {config!r} supports no {device.type} tensors; move the module to a device "
            f"that it supports, or give a process group with a backend for {device.type} (gloo for CPU)"
        )
    if dist.get_world_size(group) == 1:
        return SingleRank()
    if make is None:
        return BACKENDS.get((device.type, backend), PerTensor)(group, role)
    needs = "give a function of a process group and a number that returns a thunder_zero.comm.transport.Transport"
    try:
        transport = make(group, role)
    except Exception as error:
        raise TypeError(f"Policy.transport raised {type(error).__name__}: {error}; {needs}") from error
    if not isinstance(transport, Transport):
        raise TypeError(f"Policy.transport made a {type(transport).__name__}; {needs}")
    return transport


def model_transport(ranks: Ranks, device: torch.device, model: str, make: Make | None) -> TaggedTransport:
    """Return the tagged transports of a model, one for each axis of its mesh. ``model`` is its name in errors."""
    groups = {SHARD: ranks.shard_group}
    if ranks.replicate_group is not None:
        groups |= {REPLICATE: ranks.replicate_group, ALL: ranks.data}
    if ranks.tensor is not None:
        groups |= {TENSOR: ranks.tensor.get_group()}
    transports = {axis: transport_for(group, device, role, make) for role, (axis, group) in enumerate(groups.items())}
    let_gloo_wait_for_a_core()
    announces = is_debugging() or (device == CPU and speaks_gloo(ranks.world))  # where tags cost almost nothing
    return TaggedTransport(transports, model, ranks.world, announces=announces)


def device_for(module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device | None) -> torch.device:
    """Return the device of the shards: ``device``, that of the first parameter not on the meta device, or the default
    of the group."""
    for param in plan.params:
        original = module.get_parameter(param.path)
        if isinstance(original, DTensor) and not plan.mesh.is_sliced:
            mesh_text = "no mesh was given" if ranks.mesh is None else f"mesh has {ranks.mesh.mesh_dim_names}"
            raise ValueError(
                f"parameter {param.path!r} is a DTensor: torch (fully_shard, tensor parallelism) or thunder_zero "
                f"already shards it, and {mesh_text}; give a module of plain tensors, or give thunder_zero.compile the "
                f"whole mesh, data first: ('dp', 'tp'), or other names with "
                f"dp_mesh_dims=DataParallelMeshDims(shard=...)"
            )
        if not isinstance(original, DTensor) and _has_behaviour(original):
            raise ValueError(
                f"parameter {param.path!r} is a {type(original).__name__}, a tensor subclass, whose behaviour its "
                f"shards would not have: they are plain rows; give a module of plain tensors"
            )
    source = plan.policy.broadcast_from
    if source is not None and source >= plan.ranks:
        raise ValueError(
            f"broadcast_from is {source}, but the process group has ranks 0 to {plan.ranks - 1}; give one of them"
        )
    originals = (module.get_parameter(param.path) for param in plan.params)
    devices = (original.device for original in originals if not original.is_meta)
    supported = [pair.partition(":")[0] for pair in dist.get_backend_config(ranks.world).split(",")]
    device = device or next(devices, torch.device("cpu" if "cpu" in supported else supported[0]))
    require_reducible(plan, transport_for(ranks.world, device, make=plan.policy.transport).averages)
    try:
        _require_current(device)
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"device is '{device}', which cannot be used here ({reason}); choose a device that this machine has"
        ) from None


def require_reducible(plan: Plan, reducible: Container[torch.dtype]) -> None:
    for param in plan.params:
        if param.requires_grad and param.reduce_dtype not in reducible:
            raise ValueError(
                f"cannot reduce the gradient of parameter {param.path!r}: the backend has no sum of "
                f"{param.reduce_dtype}; give mixed_precision with reduce_dtype=torch.float32, or freeze the parameter"
            )


def memory_bytes(device: torch.device, group: dist.ProcessGroup) -> int | None:
    """Return the bytes of the smallest GPU of all ranks, for equal plans; a collective. Return None on the CPU."""
    if device.type != "cuda":
        return None
    return min(all_gather_object(torch.cuda.get_device_properties(device).total_memory, group))


def _has_behaviour(param: nn.Parameter) -> bool:
    function, dispatch = type(param).__torch_function__, type(param).__torch_dispatch__
    return function is not nn.Parameter.__torch_function__ or dispatch is not nn.Parameter.__torch_dispatch__


def _require_current(device: torch.device) -> None:
    if device.type == "cuda" and device.index not in (None, current := torch.cuda.current_device()):
        raise ValueError(
            f"device is '{device}', but the current CUDA device of this process is 'cuda:{current}', where NCCL and "
            f"the streams would run; call torch.cuda.set_device({device.index}) before init_process_group"
        )

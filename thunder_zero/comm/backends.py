"""Chooses a transport by device and backend, and builds the transport of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from thunder_zero.comm.group import Ranks
from thunder_zero.comm.host_copies import HostCopies
from thunder_zero.comm.hybrid import Hybrid
from thunder_zero.comm.lost_ranks import CPU, speaks_gloo
from thunder_zero.comm.native import Grouped, OneByOne
from thunder_zero.comm.pairwise import Exchange
from thunder_zero.comm.placed import Placed
from thunder_zero.comm.places import is_debugging
from thunder_zero.comm.staging import Staging, needs_staging
from thunder_zero.comm.transport import Alone, Transport
from thunder_zero.plan import Plan

# (device type, backend) -> transport; OneByOne for all others
BACKENDS: Mapping[tuple[str, str], Callable[[ProcessGroup, int], Transport]] = {
    ("cpu", "gloo"): Exchange,  # messages between pairs of ranks: gloo's own reduce-scatter sends twice the minimum
    ("cuda", "nccl"): Grouped,  # one launch a bucket, the mean inside the collective
    ("cuda", "fake"): Grouped,  # stands in for NCCL: the same kernels and memory, no peers
}


def transport_for(group: ProcessGroup, device: torch.device, role: int = 0) -> Transport:
    """The transport for tensors on ``device``; transports of one model that may share a group have different roles.

    Raises:
        ValueError: the group has no backend for this device.
    """
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":", 1) for pair in config.split(",")).get(device.type)
    if backend is None:
        raise ValueError(
            f"the process group's backend {config!r} supports no {device.type} tensors; move the module to a device "
            f"that it supports, or give a process group with a backend for {device.type} (gloo for CPU)"
        )
    if dist.get_world_size(group) == 1:
        return Alone()
    return BACKENDS.get((device.type, backend), OneByOne)(group, role)


def model_transport(plan: Plan, ranks: Ranks, device: torch.device, copies: HostCopies, model: str) -> Placed:
    """The transport of a model: over one group or several, with the casts and copies that the plan asks for.

    ``model`` is its name in errors. Places are announced where that costs next to nothing (gloo, in host memory), or if
    torch's debug switch asks for it.
    """
    transport = transport_for(ranks.inside, device)
    if ranks.across is not None:
        across, everyone = transport_for(ranks.across, device, role=1), transport_for(ranks.everyone, device, role=2)
        transport = Hybrid(transport, across, everyone, plan)
    if needs_staging(plan, device):
        transport = Staging(transport, plan, device, copies)
    announces = is_debugging() or (device == CPU and speaks_gloo(ranks.everyone))
    return Placed(transport, model, ranks.everyone, announces=announces)

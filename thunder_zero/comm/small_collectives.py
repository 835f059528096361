"""Runs small, tagged collectives of numbers, objects and DTensors; errors name the lost rank.

The values are not part of a program's schedule: agreements, counts, flags, a full tensor for a state dict. Ranks first
announce and compare tags, so that a mismatch raises::

    rank 0    all_gather_object, in tz.save of model 0 (Net)             -> RuntimeError
    rank 1    all_gather_tensor, in clip_grad_norm_ of model 0 (Net)     -> RuntimeError
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from thunder_zero.comm.collective_tags import compare_tags
from thunder_zero.comm.lost_ranks import naming_lost_ranks, naming_tag

T = TypeVar("T")
_next_number = 0


@contextmanager
def small_collective(step: str, group: ProcessGroup) -> Iterator[None]:
    """Tag the small collective in the block, which starts after all ranks of the group have reached it."""
    with naming_tag(compare_tags(step, group)), naming_lost_ranks(group):
        yield


def all_gather_object(value: T, group: ProcessGroup) -> list[T]:
    """Return the value of each rank of the group, in rank order; a small collective."""
    values = [value] * group.size()
    if group.size() > 1:
        with small_collective("all_gather_object", group):
            dist.all_gather_object(values, value, group=group)
    return values


def gather_object_on_rank_0(value: T, group: ProcessGroup) -> list[T]:
    """Return the value of each rank on rank 0 of the group, and [] on other ranks; a small collective."""
    values = [value] * group.size() if group.rank() == 0 else None
    if group.size() > 1:
        with small_collective("gather_object", group):
            dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def broadcast_object_from_rank_0(value: T, group: ProcessGroup) -> T:
    """Return the value of the group's rank 0; a small collective."""
    values = [value]
    if group.size() > 1:
        with small_collective("broadcast_object", group):
            dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def all_reduce_max(flags: Tensor, group: ProcessGroup) -> None:
    """Replace each element by its maximum over ranks, in place; a small collective."""
    with small_collective("max", group):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)


def all_reduce_sum(numbers: Sequence[int], group: ProcessGroup, device: torch.device) -> list[int]:
    """Return the sum of each number over ranks; a small collective."""
    if group.size() == 1:
        return list(numbers)
    totals = to_device(numbers, torch.int64, device)
    with small_collective("sum", group):
        dist.all_reduce(totals, group=group)
    return [int(total) for total in totals.tolist()]  # one read: each read makes the host wait for a GPU


def to_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a 1-D tensor of the numbers. The host does not wait for the copy to a GPU."""
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def all_gather_tensor(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the tensor of each rank, all of one shape and dtype; a small collective."""
    tensors = [torch.empty_like(tensor) for _ in range(group.size())]
    with small_collective("all_gather_tensor", group):
        dist.all_gather(tensors, tensor, group=group)
    return tensors


@torch.no_grad()
def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Overwrite a tensor on every rank with its values on rank ``source`` of the group; a small collective."""
    staged = tensor.detach().to(device).contiguous()
    if staged.numel():
        with small_collective("broadcast", group):
            dist.broadcast(flat_bytes(staged), group=group, group_src=source)  # no backend supports every dtype
        tensor.copy_(staged)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order as bytes; a view if the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def full_tensor(value: DTensor, group: ProcessGroup) -> Tensor:
    """Return the full tensor of a DTensor on every rank of the group; a collective."""
    with small_collective("full_tensor", group):
        part: Any = value.to(value.device_mesh.device_type)  # the DTensor may be in host memory
        if value.dtype.itemsize == 1:  # gloo has no float8
            part = part.view(torch.uint8)
        full: Tensor = part.full_tensor()
        return full.view(value.dtype)


def barrier(group: ProcessGroup) -> None:
    with small_collective("barrier", group):
        dist.barrier(group=group)


def next_number(group: ProcessGroup) -> int:
    """Return a number that no earlier call on any rank of the group has returned; a small collective."""
    global _next_number
    number = max(all_gather_object(_next_number, group))
    _next_number = number + 1
    return number

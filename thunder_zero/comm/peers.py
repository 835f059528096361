"""Small collectives of numbers and Python objects, and errors that name the lost rank.

If a backend loses a rank, its error has an address at best. gloo has one connection for each pair of ranks, and a
closed connection refuses the next message at once, so sending one message to each rank shows which ones are lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, ProcessGroup

Value = TypeVar("Value")
CPU, GLOO = torch.device("cpu"), "cpu:gloo"
PROBE_TAG = 0x676F6E65  # "gone": messages under this tag only test connections, nobody receives them


@contextmanager
def naming_lost_ranks(group: ProcessGroup, rank: int | None = None) -> Iterator[None]:
    """Turn an error of the backend into one that names the ranks that may be lost.

    Args:
        group: the ranks that the block communicates with.
        rank: the one rank of the group that the block waits for; None waits for all.

    Raises:
        DistNetworkError: a RuntimeError; the backend raised.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        everyone = dist.get_process_group_ranks(group)
        lost = [everyone[peer] for peer in possibly_lost(group, rank, time.monotonic() - start)]
        who = f"rank {lost[0]}" if len(lost) == 1 else f"one of ranks {lost}"
        raise DistNetworkError(
            f"rank {dist.get_rank()} got no answer from {who}: it died, failed before this one, or was silent longer "
            f"than the process group's timeout; read its last output, then restart all ranks from the last checkpoint "
            f"({error})"
        ) from error


def possibly_lost(group: ProcessGroup, rank: int | None, seconds: float) -> list[int]:
    """Ranks of the group that may be lost after waiting for ``rank`` (None: for all) for so many seconds.

    gloo knows which connections are closed, but not after a timeout, since it then closes all of them itself.
    """
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    waited_for = peers if rank is None else [rank]
    if GLOO not in dist.get_backend_config(group).split(",") or seconds >= timeout_of(group, CPU).total_seconds():
        return waited_for
    return [peer for peer in peers if _is_closed(peer, group)] or waited_for


def _is_closed(peer: int, group: ProcessGroup) -> bool:
    """Whether the connection to a rank of the group refuses a message."""
    try:
        dist.isend(torch.empty(1), group=group, group_dst=peer, tag=PROBE_TAG)
    except RuntimeError:
        return True
    return False


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of the group's collectives of tensors on this device.

    Private in torch, and there is no public way.
    """
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def all_gather_object(value: Value, group: ProcessGroup) -> list[Value]:
    """The value of each rank of the group, in rank order; a small collective."""
    values = [value] * group.size()
    if group.size() > 1:
        with naming_lost_ranks(group):
            dist.all_gather_object(values, value, group=group)
    return values


def gather_object_on_rank_0(value: Value, group: ProcessGroup) -> list[Value]:
    """The value of each rank of the group, in rank order, on its rank 0; empty on the others. A small collective."""
    values = [value] * group.size() if group.rank() == 0 else None
    if group.size() > 1:
        with naming_lost_ranks(group):
            dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def broadcast_object_from_rank_0(value: Value, group: ProcessGroup) -> Value:
    """The value of the group's rank 0; a small collective."""
    values = [value]
    if group.size() > 1:
        with naming_lost_ranks(group):
            dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def all_reduce_max(flags: Tensor, group: ProcessGroup) -> None:
    """Replace each element by its maximum over ranks, in place; a small collective."""
    with naming_lost_ranks(group):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)


def all_reduce_sum(numbers: Sequence[int], group: ProcessGroup, device: torch.device) -> list[int]:
    """The sum of each number over ranks; a small collective."""
    totals = torch.tensor(numbers, dtype=torch.int64, device=device)
    with naming_lost_ranks(group):
        dist.all_reduce(totals, group=group)
    return [int(total) for total in totals]


def all_gather_tensor(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """The tensor of each rank, in rank order; all have one shape and dtype. A small collective."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    with naming_lost_ranks(group):
        dist.all_gather(found, tensor, group=group)
    return found


def barrier(group: ProcessGroup) -> None:
    """Wait until all ranks have come here."""
    with naming_lost_ranks(group):
        dist.barrier(group=group)

"""What ranks tell each other beside the model's tensors, and what is said when one of them does not answer.

A backend that loses a rank tells an address at best. gloo's connections are one a pair of ranks, and one that is
closed refuses the next message at once; so a message to each rank tells which are gone.
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

Told = TypeVar("Told")
CPU, GLOO = torch.device("cpu"), "cpu:gloo"
PROBE = 0x676F6E65  # "gone": the tag of messages that nobody receives


@contextmanager
def answered(group: ProcessGroup, rank: int | None = None) -> Iterator[None]:
    """What fails inside of the block names whom it waited for: ``rank`` of the group, if it is a message of or to that
    one, and those that are gone.

    Raises:
        DistNetworkError: a RuntimeError; the backend raised.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        everyone = dist.get_process_group_ranks(group)
        lost = [everyone[peer] for peer in suspects(group, rank, time.monotonic() - start)]
        who = f"rank {lost[0]}" if len(lost) == 1 else f"one of ranks {lost}"
        raise DistNetworkError(
            f"rank {dist.get_rank()} got no answer from {who}: it died, failed before this one, or was silent for the "
            f"process group's time-out; see what it printed last, and start all ranks again from the last checkpoint "
            f"({error})"
        ) from error


def suspects(group: ProcessGroup, rank: int | None, seconds: float) -> list[int]:
    """Which ranks of the group one that waited so long, for ``rank`` or for all, may have lost.

    gloo tells which connections are closed, but not after a time-out: then it closes all by itself.
    """
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    waited_for = peers if rank is None else [rank]
    if GLOO not in dist.get_backend_config(group).split(",") or seconds >= timeout_of(group, CPU).total_seconds():
        return waited_for
    return [peer for peer in peers if _refuses(peer, group)] or waited_for


def _refuses(peer: int, group: ProcessGroup) -> bool:
    try:
        dist.isend(torch.empty(1), group=group, group_dst=peer, tag=PROBE)
    except RuntimeError:
        return True
    return False


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's collectives of tensors on this device may take; for other groups that are to fail as soon.

    Private in torch, and there is no public way.
    """
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def told_by_all(value: Told, group: ProcessGroup) -> list[Told]:
    """What each rank of the group tells, in rank order; a small collective."""
    of_all = [value] * group.size()
    if group.size() > 1:
        with answered(group):
            dist.all_gather_object(of_all, value, group=group)
    return of_all


def told_to_rank_0(value: Told, group: ProcessGroup) -> list[Told]:
    """On rank 0 what each rank tells, in rank order, elsewhere nothing; a small collective."""
    of_all = [value] * group.size() if group.rank() == 0 else None
    if group.size() > 1:
        with answered(group):
            dist.gather_object(value, of_all, group=group, group_dst=0)
    return of_all or []


def told_by_rank_0(value: Told, group: ProcessGroup) -> Told:
    """What rank 0 of the group tells; a small collective."""
    told = [value]
    if group.size() > 1:
        with answered(group):
            dist.broadcast_object_list(told, group=group, group_src=0)
    return told[0]


def largest_of_all(flags: Tensor, group: ProcessGroup) -> None:
    """Each element becomes the largest that any rank has, in place; a small collective."""
    with answered(group):
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)


def sums_of_all(numbers: Sequence[int], group: ProcessGroup, device: torch.device) -> list[int]:
    """The sum of all ranks' numbers, one by one; a small collective."""
    totals = torch.tensor(numbers, dtype=torch.int64, device=device)
    with answered(group):
        dist.all_reduce(totals, group=group)
    return [int(total) for total in totals]


def tensors_of_all(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Each rank's tensor, in rank order; all have one shape and dtype. A small collective."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    with answered(group):
        dist.all_gather(found, tensor, group=group)
    return found


def meet(group: ProcessGroup) -> None:
    """Wait until all ranks are here."""
    with answered(group):
        dist.barrier(group=group)

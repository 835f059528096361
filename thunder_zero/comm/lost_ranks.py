"""Makes errors of collectives name the rank that died or does not answer.

If a backend loses a rank, its error has an address at best. gloo has one connection for each pair of ranks, and a
closed connection refuses the next message at once, so sending one message to each rank shows which ones are lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, ProcessGroup

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

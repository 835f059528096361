"""Makes errors of collectives name the rank that died or does not answer.

A backend's error about a lost rank has the rank's address at best. Gloo has one connection for each pair of ranks, and
a closed connection rejects the next message immediately. So one message to each rank shows which ranks are lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup

from thunder_zero.compat.torch.groups import timeout_of

CPU, GLOO = torch.device("cpu"), "cpu:gloo"
PROBE_TAG = 0x676F6E65  # "gone": messages under this tag only test connections, nobody receives them

LOST_TYPES = (DistNetworkError, DistStoreError)  # torch's classes: a socket failed; a rank left the store
# Texts of the backends about a lost rank, in errors of other types.
LOST_WORDS = (
    # gloo: a connection ended, broke, or timed out
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
    "Socket (unexpectedly )?closed",
    "Timed out waiting",
    "(Read|Write|Connect|Wait|Socket) [Tt]imeout",
    "Application timeout caused pair closure",  # an earlier message timed out
    "connectFullMesh failed",
    "monitoredBarrier",  # under TORCH_DISTRIBUTED_DEBUG=DETAIL gloo's groups check each collective by a barrier
    # NCCL: a peer's process ended, a socket failed, torch's watchdog on this or another rank timed out
    "remote process exited",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
    "[Ww]atchdog caught collective operation timeout",
    "collective operation timed? ?out",
)
_LOST = re.compile("|".join(LOST_WORDS))


class LostRank(DistNetworkError):
    """A rank died or does not answer. ``who`` is, for example, ``"one of ranks [1, 2]"``."""

    def __init__(self, rank: int, who: str, reason: str, tag: str = "") -> None:
        suffix = f" in {tag}" * bool(tag)
        super().__init__(
            f"rank {rank} got no answer from {who}{suffix}: it died, failed before this one, or was silent longer than "
            f"the process group's timeout; read its last output, then restart all ranks from the last checkpoint "
            f"({reason})"
        )
        self._facts = rank, who, reason
        self.tag = tag

    def at(self, tag: str) -> LostRank:
        return self if self.tag else LostRank(*self._facts, tag)

    def __reduce__(self) -> tuple[type[LostRank], tuple[int, str, str, str]]:
        return LostRank, (*self._facts, self.tag)


@contextmanager
def naming_tag(tag: str) -> Iterator[None]:
    """Add a tag to each :class:`LostRank` that the block raises."""
    try:
        yield
    except LostRank as lost:
        raise lost.at(tag) from lost.__cause__


def is_about_lost_rank(error: RuntimeError) -> bool:
    return isinstance(error, LOST_TYPES) or _LOST.search(str(error)) is not None


@contextmanager
def naming_lost_ranks(group: ProcessGroup, rank: int | None = None, timeout: timedelta | None = None) -> Iterator[None]:
    """Replace a backend's error about a lost rank by a :class:`LostRank`; keep all other errors.

    The block waits for ``rank``, or for all ranks of the group. ``timeout`` is that of the group if it is None.
    """
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise_named(error, group, start, rank, timeout)


def raise_named(
    error: RuntimeError, group: ProcessGroup, start: float, rank: int | None = None, timeout: timedelta | None = None
) -> NoReturn:
    """Raise an error as :func:`naming_lost_ranks` does. ``start`` is the ``time.monotonic()`` at which waiting began.

    Code that runs often calls this function in an ``except``, since a ``try`` costs less than a context manager.
    """
    if isinstance(error, LostRank) or not is_about_lost_rank(error):
        raise error
    global_ranks = dist.get_process_group_ranks(group)
    lost = [global_ranks[peer] for peer in find_possibly_lost(group, rank, time.monotonic() - start, timeout)]
    who = f"rank {lost[0]}" if len(lost) == 1 else f"one of ranks {lost}"
    raise LostRank(dist.get_rank(), who, str(error)) from error


def find_possibly_lost(group: ProcessGroup, rank: int | None, seconds: float, timeout: timedelta | None) -> list[int]:
    """Return the ranks of the group that may be lost after ``seconds`` of waiting. After a timeout, gloo itself closes
    all connections."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    waited_for = peers if rank is None else [rank]
    if not speaks_gloo(group) or seconds >= (timeout or timeout_of(group, CPU)).total_seconds():
        return waited_for
    return [peer for peer in peers if _is_closed(peer, group)] or waited_for


def speaks_gloo(group: ProcessGroup) -> bool:
    """Return whether gloo carries the group's CPU tensors."""
    return GLOO in dist.get_backend_config(group).split(",")


def _is_closed(peer: int, group: ProcessGroup) -> bool:
    try:
        dist.isend(torch.empty(1), group=group, group_dst=peer, tag=PROBE_TAG)
    except RuntimeError:
        return True
    return False

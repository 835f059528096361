"""needed while: torch has no public process group whose ranks are threads of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from types import CodeType, FrameType
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from thunder_zero.compat.private import set_thread_isolation_mode, store_based_barrier, threaded_groups

JOIN = threaded_groups.Collective.join  # where a rank waits for the other ranks of a collective
WAITS: tuple[CodeType, ...] = (JOIN.__code__, store_based_barrier.__code__)


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Inside the block, each thread may join a default group of its own by :func:`join_group`.

    torch replaces the registry of the process's groups for the block. The groups of the process are untouched.

    Raises:
        RuntimeError: the process is in such a block already.
    """
    if isinstance(distributed_c10d.__dict__["_world"], threaded_groups.ThreadLocalWorld):
        raise RuntimeError("ranks already run as threads of this process; run one comparison at a time")
    excepthook = sys.excepthook  # each init_process_group adds a rank to it
    threaded_groups._install_threaded_pg()
    set_thread_isolation_mode(True)
    threaded_groups.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        threaded_groups.ProcessLocalGroup.reset()
        set_thread_isolation_mode(False)
        threaded_groups._uninstall_threaded_pg()
        sys.excepthook = excepthook


def join_group(rank: int, world_size: int, store: Any) -> None:
    """Make the default group of this thread."""
    dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)


def end_waits() -> None:
    """Raise SystemExit in the threads that wait in a collective, and in those that will call one."""
    with suppress(RuntimeError):  # a thread may add a collective; the caller calls again
        threaded_groups.ProcessLocalGroup.exception_handle(None)


def frame_of(thread: Thread) -> FrameType | None:
    """Return the frame in which a thread is, or None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def waiting_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the collective in which a thread waits for other ranks, or None if it does not wait."""
    while frame is not None and frame.f_code not in WAITS:
        if not frame.f_code.co_filename.endswith("threading.py"):  # a waiting thread has only waits below
            return None
        frame = frame.f_back
    return frame

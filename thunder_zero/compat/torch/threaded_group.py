"""needed while: torch has no public process group whose ranks are threads of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import unwrap
from threading import Thread
from types import CodeType, FrameType
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from thunder_zero.compat.private import set_thread_isolation_mode, store_based_barrier, threaded_groups

MAKE_GROUPS = ("new_group", "init_process_group")
JOIN: CodeType = threaded_groups.Collective.join.__code__  # where a rank waits for the other ranks of a collective
BARRIER: CodeType = unwrap(store_based_barrier).__code__  # where a rank waits for the other ranks of a new group


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


def end_waits(store: dist.Store) -> None:
    """Wake up threads that wait for other ranks. Collectives raise SystemExit in their threads from now on."""
    for key in store.list_keys():  # of ranks that make a group
        if distributed_c10d.STORE_BASED_BARRIER_PREFIX in key and not key.endswith("last_worker"):
            store.set(f"{key}:last_worker", "1")
    with suppress(RuntimeError):  # a thread may add a collective; the caller calls again
        threaded_groups.ProcessLocalGroup.exception_handle(None)


def frame_of(thread: Thread) -> FrameType | None:
    """Return the frame in which a thread is, or None if it has ended."""
    return sys._current_frames().get(thread.ident or 0)


def waiting_call(thread: Thread) -> FrameType | None:
    """Return the frame of the collective, or of ``new_group``, in which a thread waits for ranks that have not come.

    The result is None for a thread that runs, and for one that will wake up because all ranks have come.
    """
    frame = frame_of(thread)
    while frame is not None and frame.f_code not in (JOIN, BARRIER):
        if not frame.f_code.co_filename.endswith("threading.py"):  # a waiting thread has only waits below
            return None
        frame = frame.f_back
    if frame is None or _have_all_come(frame.f_code, frame.f_locals):
        return None
    if frame.f_code is JOIN:
        return frame.f_back
    while frame.f_back is not None and frame.f_code.co_name not in MAKE_GROUPS:
        frame = frame.f_back
    return frame


def _have_all_come(code: CodeType, values: Mapping[str, Any]) -> bool:
    if code is JOIN:
        collective = values["self"]
        return bool(collective._count >= collective._world_size)
    last = values.get("last_worker_key")
    return last is None or bool(values["store"].check([last]))

"""needed while: torch has no public process group whose ranks are threads of one process.

::

    rank 0   all_reduce --- waits ---+
    rank 1   raised ValueError       +--> RuntimeError: rank 1 of 2 raised ValueError: ...
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TypeVar

from torch import distributed as dist
from torch.distributed import distributed_c10d

from thunder_zero.compat.private import set_thread_isolation_mode, threaded_groups

POLL = 0.5  # seconds between two looks at the ranks
GRACE = 15  # seconds that ranks have to end; one that makes a group takes up to 10
T = TypeVar("T")


def run_ranks(world_size: int, function: Callable[[int], T], timeout: float) -> list[T]:
    """Return the results of ``function(rank)`` on threads, each with a default group of all threads.

    Raises:
        RuntimeError: a rank raised, ranks wait for each other, or they ran longer than ``timeout`` seconds. The error
            names the ranks, and its cause has their tracebacks. All threads have ended.
    """
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = function(rank)
        except BaseException as error:
            error.add_note(f"on rank {rank}")
            errors[rank] = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)]
    with _threads_as_ranks():
        try:
            for thread in threads:
                thread.start()
            problem = _wait_for(threads, errors, timeout)
            first = next(iter(errors.items()), None)
        finally:
            _end(threads)
    if first is not None:
        rank, error = first
        raise RuntimeError(f"rank {rank} of {world_size} raised {type(error).__name__}: {error}") from error
    if problem:
        advice = "every rank must call the same collectives of a group in the same order"
        where = BaseExceptionGroup("where each rank was", [*errors.values()]) if errors else None
        raise RuntimeError(f"{problem}; {advice}") from where
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _threads_as_ranks() -> Iterator[None]:
    """Inside the block, torch has a registry of groups for each thread. The groups of the process are untouched."""
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


def _wait_for(threads: Sequence[Thread], errors: Mapping[int, BaseException], timeout: float) -> str:
    """Wait until all ranks have ended, or one raised. Return why the others will not end, or an empty string."""
    until = time.monotonic() + timeout
    last = None
    while (alive := [thread for thread in threads if thread.is_alive()]) and not errors:
        collectives = [*threaded_groups.ProcessLocalGroup._cur_coll_on_pgs.values()]
        waits = [(one, one._count) for one in collectives if one._count < one._world_size]  # for ranks to come
        if waits == last and sum(count for _, count in waits) == len(alive):
            return f"{', '.join(thread.name for thread in alive)} wait for ranks that do not come"
        if time.monotonic() > until:
            return f"{', '.join(thread.name for thread in alive)} still run after {timeout:g} s"
        last = waits
        alive[0].join(POLL)
    return ""


def _end(threads: Sequence[Thread]) -> None:
    """End all threads: those in collectives wake up, and others get SystemExit at their next line."""
    for _ in range(GRACE):
        alive = [thread for thread in threads if thread.is_alive()]
        with suppress(RuntimeError):  # a thread added a collective meanwhile
            threaded_groups.ProcessLocalGroup.exception_handle(None)
        for thread in alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        for thread in alive:
            thread.join(1 / len(alive))

"""Runs a function on ranks that are threads. Ranks that wait for each other raise.

::

    rank 0   all_reduce --- waits ---+
    rank 1   raised ValueError       +--> RuntimeError: rank 1 of 2 raised ValueError: ...
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

from torch import distributed as dist

from thunder_zero.compat.torch.threaded_group import end_waits, frame_of, join_group, threads_as_ranks, waiting_call

POLL = 0.02  # seconds between two looks at the ranks
STUCK = 100  # looks in which all ranks wait in the same calls, for ranks that have not come
GRACE = 10.0  # seconds that ranks have to end after an error
OWN, LIBRARIES = str(Path(__file__).parents[1]), (str(Path(dist.__file__).parents[1]), threading.__file__)
T = TypeVar("T")


def run_ranks(world_size: int, function: Callable[[int], T], timeout: float) -> list[T]:
    """Return the results of ``function(rank)`` on threads, each with a default group of all threads.

    Raises:
        RuntimeError: a rank raised, ranks wait for each other, or they ran longer than ``timeout`` seconds. The error
            names the ranks. All threads have ended.
    """
    with threads_as_ranks():
        store = dist.HashStore()
        ranks = [_Rank(rank, world_size, function, store) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start()
            _wait_for(ranks, timeout)
        finally:
            _end(ranks)
    return [rank.result for rank in ranks]


class _Rank(threading.Thread, Generic[T]):
    """A thread that runs the function as one rank."""

    result: T

    def __init__(self, rank: int, world_size: int, function: Callable[[int], T], store: dist.Store) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)
        self.rank, self.world_size, self.function, self.store = rank, world_size, function, store
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            join_group(self.rank, self.world_size, self.store)
            self.result = self.function(self.rank)
        except BaseException as error:
            self.error = error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def place(self) -> str:
        """Return where the thread is, such as ``waits in allreduce, called at train.py:12 in forward``."""
        if not self.is_alive():
            return "has ended"
        call = waiting_call(self)
        frame = call or frame_of(self)
        where = "runs" if call is None else f"waits in {call.f_code.co_name}"
        while frame is not None and frame.f_code.co_filename.startswith(LIBRARIES):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith(OWN):
            return "waits for the others" if call is not None else "compares"
        code = frame.f_code
        return f"{where}, called at {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def _wait_for(ranks: list[_Rank[T]], timeout: float) -> None:
    """Wait until all ranks have ended. Raise if one raised, if they are stuck, or after ``timeout`` seconds."""
    begin = time.monotonic()
    looks = 0
    last_calls: list[FrameType | None] = []
    while alive := [rank for rank in ranks if rank.is_alive()]:
        alive[0].join(POLL)
        _raise_error(ranks)
        calls = [waiting_call(rank) for rank in alive]
        looks = looks + 1 if calls == last_calls and None not in calls else 0
        last_calls = calls
        if looks >= STUCK or time.monotonic() - begin > timeout:
            places = "; ".join(f"rank {rank.rank} {rank.place()}" for rank in ranks)
            problem = "ranks wait for each other" if looks >= STUCK else f"ranks still run after {timeout:g} s"
            raise RuntimeError(
                f"{problem}: {places}; every rank must call the same collectives of a group in the same order"
            )
    _raise_error(ranks)


def _raise_error(ranks: list[_Rank[T]]) -> None:
    for rank in ranks:
        if rank.error is not None:
            raise RuntimeError(
                f"rank {rank.rank} of {len(ranks)} raised {type(rank.error).__name__}: {rank.error}"
            ) from rank.error


def _end(ranks: list[_Rank[T]]) -> None:
    """End all threads: those in collectives wake up, and others get SystemExit at their next line."""
    until = time.monotonic() + GRACE
    while (alive := [rank for rank in ranks if rank.is_alive()]) and time.monotonic() < until:
        end_waits(ranks[0].store)
        for rank in alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(rank.ident or 0), ctypes.py_object(SystemExit))
        alive[0].join(POLL)

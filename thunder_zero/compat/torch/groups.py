"""Process groups: launches, timeouts, gloo threads, exit."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from thunder_zero.compat.private import c10d_world, coalescing_manager

# needed while: torch has no public API to group collectives, and leaves failed ones queued.


@contextmanager
def one_launch(group: ProcessGroup) -> Iterator[Any]:
    """Launch the block's collectives together. Yield an object whose ``wait()`` may be called after the block.

    After an exception inside the block, such as an interrupt, torch would leave collectives in the group's queue. Then
    later collectives of the group would never be launched.
    """
    try:
        with coalescing_manager(group, async_ops=True) as launched:
            yield launched
    except BaseException:
        c10d_world.pg_coalesce_state.pop(group, None)
        raise


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the group's collectives of tensors on a device."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


# needed while: torchrun gives restarted ranks the store of dead ranks.
# gloo and NCCL then find the addresses of dead ranks under the names of their own. Each node counts its restarts alone,
# so no environment variable of a rank names the attempt.


def restarts_on_one_store() -> int:
    """Return how often torchrun may restart the ranks on one store, and 0 if each attempt has a store."""
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) if shares_store else 0


# needed while: gloo's thread polls a connection to which another thread writes.
# Arriving data wakes the thread. If gloo's thread then preempts the writer, it polls until it loses the core again.
# This takes a third of a step's CPU time where cores are few. Linux can wake a thread without preempting another
# thread. Then gloo's thread waits for a core instead.

GLOO_LOOP = "gloo_tcp_loop"  # the name of the thread


def wait_for_a_core(thread: int) -> None:
    """On Linux, keep a woken thread from preempting other threads. ``thread`` is the system's thread id."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it, and the thread may have ended
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def let_gloo_wait_for_a_core() -> None:
    """Apply :func:`wait_for_a_core` to gloo's running threads; idempotent."""
    for thread in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):
            if thread.read_text().strip() == GLOO_LOOP:
                wait_for_a_core(int(thread.parent.name))


# needed while: a thread of gloo that still holds tensors aborts a process that exits.
# Torch joins such a thread when the last reference to a destroyed group is dropped. At exit Python stops no thread
# cleanly.


def at_exit(function: Callable[..., None], *args: Any) -> None:
    """Call a function when the interpreter exits. Functions are called in reverse order of registration."""
    atexit.register(function, *args)


# needed while: torch has no public way to make a group of processes that share no default group.
# ``init_process_group`` makes one default group a process. Sites have a group each, and meet in further ones.


def lone_group(store: Store, rank: int, size: int, timeout: float, address: str) -> ProcessGroup:
    """Return a gloo group that no other group knows of, on the network interface with this address."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._timeout, options._devices = timedelta(seconds=timeout), [gloo.create_device(hostname=address)]
    group: ProcessGroup = gloo(store, rank, size, options)
    return group

"""Writes copies of values in a background thread, with a separate process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from thunder_zero.checkpoint.dcp_write import Entries
from thunder_zero.comm.agree import all_or_none
from thunder_zero.comm.group import group_like
from thunder_zero.sharded.state import State

WriteCheckpoint = Callable[[Entries, dist.ProcessGroup], Path]


class BackgroundSaves:
    """The asynchronous saves of a model. Saves run one after the other, in one thread."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.last: Future[Path] | None = None
        self.group = group_like(group, device)  # so that collectives of saves and training do not mix
        # The current CUDA device of a new thread is device 0, where the thread would allocate memory.
        set_device = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "thunder_zero-save", set_device)


def save_in_thread(state: State, entries: Entries, write: WriteCheckpoint) -> Future[Path]:
    """Copy entries to the CPU, and start writing the copies in a thread. This is a collective.

    If the save fails, the thread emits a warning, and the next save raises.
    """
    saves: BackgroundSaves = state.saves or BackgroundSaves(state.group, state.device)
    state.saves = saves
    with all_or_none(state.group, "to save"):
        copies = {
            key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in entries.items()
        }
    saves.last = saves.thread.submit(write, copies, saves.group)
    saves.last.add_done_callback(_warn_of_error)
    return saves.last


def wait_for_last(state: State) -> BaseException | None:
    """Wait for the last asynchronous save of a model; return its error, or None."""
    last: Future[Path] | None = state.saves and state.saves.last
    return None if last is None else last.exception()


def raise_error_of_last(state: State) -> None:
    """Wait for the last asynchronous save of a model, and raise its error. An error is raised only once."""
    if (error := wait_for_last(state)) is not None:
        state.saves.last = None
        raise RuntimeError(f"the previous asynchronous save failed: {error}; call save again") from error


def _warn_of_error(future: Future[Path]) -> None:
    if (error := future.exception()) is not None:
        warnings.warn(f"an asynchronous save failed: {error}; the next save raises this error", stacklevel=2)

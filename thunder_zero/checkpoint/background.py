"""Saves in a thread while training continues: ``tz.save(wait=False)``.

The thread uses a process group of its own, since its collectives must not meet training's.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from thunder_zero.checkpoint.dcp_write import Entries
from thunder_zero.checkpoint.write import write_checkpoint
from thunder_zero.comm.group import group_like
from thunder_zero.runtime.state import State


class BackgroundSaves:
    """A model's asynchronous saves, one after the other: their thread, their process group, and the last of them."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.last: Future[Path] | None = None
        self._group = group_like(group, device)
        # A new thread's current CUDA device is the first one: what it did on it would take memory there.
        choose = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "thunder_zero-save", choose)

    def start(self, path: Path, entries: Entries, max_to_keep: int | None) -> Future[Path]:
        """Save in the thread; warn of an error at once, and raise it from the next save, too."""
        self.last = self._thread.submit(write_checkpoint, path, entries, max_to_keep, self._group)
        self.last.add_done_callback(_warn_of_error)
        return self.last


_saves_by_state: WeakKeyDictionary[State, BackgroundSaves] = WeakKeyDictionary()


def background_saves(state: State) -> BackgroundSaves:
    """A model's asynchronous saves; a collective, the first time."""
    if state not in _saves_by_state:
        _saves_by_state[state] = BackgroundSaves(state.group, state.device)
    return _saves_by_state[state]


def wait_for_last(state: State) -> None:
    """Wait for an asynchronous save that is running; if it failed, the next save raises its error."""
    saves = _saves_by_state.get(state)
    if saves is not None and saves.last is not None:
        saves.last.exception()


def raise_error_of_last(state: State) -> None:
    """Wait for an asynchronous save that is running.

    Raises:
        RuntimeError: it failed.
    """
    saves = _saves_by_state.get(state)
    if saves is not None and saves.last is not None:
        last, saves.last = saves.last, None
        if (error := last.exception()) is not None:
            raise RuntimeError(f"the previous asynchronous save failed: {error}; call save again") from error


def _warn_of_error(saved: Future[Path]) -> None:
    if (error := saved.exception()) is not None:
        warnings.warn(f"an asynchronous save failed: {error}; the next save raises this error", stacklevel=2)

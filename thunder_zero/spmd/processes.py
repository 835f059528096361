"""Runs a step as several ranks, each in a process of its own.

DTensor's caches keep the first mesh, so a process can be one rank only::

    this process -> starter, which imports modules -- forks --> other ranks: records --\\
                           \\-> rank 0, which types <-------------------------------------/ -> result
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

Key = TypeVar("Key")
Call = tuple[str, tuple[Any, ...]]  # a function, such as "package.module:name", and arguments that can be pickled


class NotChecked(RuntimeError):
    """A step that cannot be recorded, and why."""


def run_in_processes(first: Call, others: Mapping[Key, Call], seconds: float, preload: Sequence[str] = ()) -> Any:
    """Return ``function(*args, results)`` of the first call, where ``results()`` has those of the other calls.

    Each call has a process of its own, forked from one that has imported the modules of ``preload`` and computed
    nothing. What a call raises is its result. All processes have ended.

    Raises:
        TypeError: other processes cannot import an argument.
    """
    try:
        tasks = [pickle.dumps(call) for call in (first, *others.values())]
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(f"another process cannot import it: {error}; define step at the top of a file") from error
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    starter = context.Process(target=_start, args=(tasks, [*others], preload, theirs))
    starter.start()
    theirs.close()
    try:
        return _received(mine) if mine.poll(seconds) else NotChecked(f"a rank took over {seconds:.0f} s")
    finally:
        with suppress(AttributeError, ProcessLookupError):  # no groups on Windows; it has ended, or not begun
            os.killpg(starter.pid or 0, signal.SIGKILL)
        starter.kill()
        starter.join()
        mine.close()


def _start(tasks: Sequence[bytes], keys: Sequence[Any], preload: Sequence[str], writer: Any) -> None:
    """Start a process for each other task, and run the first task."""
    with suppress(AttributeError):
        os.setpgid(0, 0)  # one signal ends the other ranks, too
    for name in preload:
        import_module(name)
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("fork" if can_fork else "spawn")
    readers = {}
    for key, task in zip(keys, tasks[1:], strict=True):
        readers[key], theirs = context.Pipe(duplex=False)
        context.Process(target=_run_other, args=(task, theirs, writer), daemon=True).start()
        theirs.close()
    _run(tasks[0], writer, lambda: {key: _received(reader) for key, reader in readers.items()})


def _run_other(task: bytes, writer: Any, first: Any) -> None:
    first.close()  # the first rank's pipe ends with that rank
    _run(task, writer)


def _run(task: bytes, writer: Any, *more: Any) -> None:
    try:
        place, args = pickle.loads(task)
        module, _, name = place.partition(":")
        result = getattr(import_module(module), name)(*args, *more)
    except Exception as error:
        result = _sendable(error)
    writer.send(result)


def _received(reader: Any) -> Any:
    try:
        return reader.recv()
    except (EOFError, ConnectionResetError):
        return NotChecked("a rank ended without a result")


def _sendable(error: Exception) -> Exception:
    """Return an error with its traceback as a note, or a plain error in place of one that cannot be sent."""
    note = "".join(traceback.format_exception(error))
    try:
        copied: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = RuntimeError(f"{type(error).__name__}: {error}")
    copied.add_note(note)
    return copied

"""Runs a step as several ranks, each in a process of its own: DTensor's caches keep a mesh.

::

    this process -> starter, which imports nothing -> its fork server -> rank 0, which types -----> result
                                                                     \\-> other ranks: records --/
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

Key = TypeVar("Key")
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments, which other processes can import


class NotChecked(RuntimeError):
    """A step that cannot be recorded, and why."""


def run_in_processes(first: Call, others: Mapping[Key, Call], seconds: float, preload: Sequence[str] = ()) -> Any:
    """Return ``function(*args, results)`` of the first call, where ``results()`` has those of the other calls.

    Each call has a process of its own, forked from one that has imported the modules of ``preload`` and computed
    nothing. What a call raises is its result. All processes have ended.

    Raises:
        TypeError: other processes cannot import a function or an argument.
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
    """Start a process for each task. A fork server of its own leaves that of the caller as it is."""
    with suppress(AttributeError):
        os.setpgid(0, 0)  # one signal ends the server and the ranks, too
    has_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_fork else "spawn")
    if has_fork:
        context.set_forkserver_preload([*preload])
    readers, processes = {}, []
    for key, task in zip(keys, tasks[1:], strict=True):
        readers[key], theirs = context.Pipe(duplex=False)
        processes.append(context.Process(target=_run, args=(task, theirs)))
        processes[-1].start()
        theirs.close()
    processes.append(context.Process(target=_run, args=(tasks[0], writer, readers)))
    processes[-1].start()
    writer.close()
    for process in processes:
        process.join()


def _run(task: bytes, writer: Any, readers: Mapping[Any, Any] | None = None) -> None:
    try:
        function, args = pickle.loads(task)
        if readers is not None:
            args = (*args, lambda: {key: _received(reader) for key, reader in readers.items()})
        result = function(*args)
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

"""Runs a step as several ranks, each in a process of its own: DTensor's caches keep the first mesh.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    if _kept:
        return _kept[-1].run(tasks, [*others], seconds)
    with kept_starter(preload) as starter:
        return starter.run(tasks, [*others], seconds)


@contextmanager
def kept_starter(preload: Sequence[str]) -> Iterator[Starter]:
    """Inside the block, all calls share one starter, so that modules are imported once."""
    starter = Starter(preload)
    _kept.append(starter)
    try:
        yield starter
    finally:
        _kept.remove(starter)
        starter.end()


class Starter:
    """A process that starts the others. Its fork server is its own: that of the caller stays as it is."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload
        self._process: Any = None  # until the first run, and after a run that took too long

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._preload))
        self._process.start()
        theirs.close()

    def run(self, tasks: Sequence[bytes], keys: Sequence[Any], seconds: float) -> Any:
        if self._process is None:
            self._start()
        self._pipe.send((tasks, keys))
        if self._pipe.poll(seconds):
            return _received(self._pipe)
        self.end()
        return NotChecked(f"a rank took over {seconds:.0f} s")

    def end(self) -> None:
        """End the process, its server and all ranks."""
        if self._process is None:
            return
        with suppress(AttributeError, ProcessLookupError):  # no groups on Windows; it has ended, or not begun
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process = None
        self._pipe.close()


_kept: list[Starter] = []


def _serve(pipe: Any, preload: Sequence[str]) -> None:
    with suppress(AttributeError):
        os.setpgid(0, 0)  # one signal ends the server and the ranks, too
    has_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if has_fork else "spawn")
    if has_fork:
        context.set_forkserver_preload([*preload])
    with suppress(EOFError):  # the caller has ended
        while True:
            tasks, keys = pipe.recv()
            pipe.send_bytes(_result_of(context, tasks, keys))


def _result_of(context: Any, tasks: Sequence[bytes], keys: Sequence[Any]) -> bytes:
    """Start a process for each task, and return the pickled result of the first one."""
    processes: list[Any] = []
    readers: list[Any] = []
    for task in (*tasks[1:], tasks[0]):
        reader, theirs = context.Pipe(duplex=False)
        of_others = dict(zip(keys, readers, strict=True)) if task is tasks[0] else None
        processes.append(context.Process(target=_run, args=(task, theirs, of_others)))
        processes[-1].start()
        theirs.close()
        readers.append(reader)
    try:
        return bytes(readers[-1].recv_bytes())
    except (EOFError, ConnectionResetError):
        return pickle.dumps(NotChecked("a rank ended without a result"))
    finally:
        for process, reader in zip(processes, readers, strict=True):
            process.kill()
            process.join()
            reader.close()


def _run(task: bytes, writer: Any, readers: Mapping[Any, Any] | None = None) -> None:
    try:
        place, args = pickle.loads(task)
        module, _, name = place.partition(":")
        if readers is not None:
            args = (*args, lambda: {key: _received(reader) for key, reader in readers.items()})
        result = getattr(import_module(module), name)(*args)
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

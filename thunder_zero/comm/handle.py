"""Defines handles of launched buckets, and two threads: one posts messages, one averages.

A handle is waited for once, and keeps its tensors alive until then. A thread runs its tasks in order::

    launch     Handle(parts, results)     each part: messages in flight, then local work, such as a mean
    wait()     finishes parts in order    -> results, one tensor for each parameter of the bucket
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from thunder_zero.compat.torch.groups import at_exit, wait_for_a_core

Result = TypeVar("Result")


class Waitable(Protocol):
    """A launched collective of one bucket."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the collective has ended; return one tensor for each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitsBy:
    """A handle whose ``wait`` calls a given function, such as a wrapper of another handle's wait, at most once."""

    wait: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A part of a bucket that finishes independently."""

    # functions that return when a message has ended, or raise if it failed. They are called in order.
    waits: Iterable[Callable[[], object]]
    then: Callable[[], object] | None = None  # a function that does local work on the received data

    def finish(self) -> None:
        """Wait for all messages, then do the local work."""
        for wait in self.waits:
            wait()
        if self.then is not None:
            self.then()


class Handle:
    """A launched bucket, which keeps every tensor alive that the backend still reads or writes.

    The transport holds the handle in ``pending`` until it has ended, so that dropping a handle never frees memory to
    which the backend still writes.
    """

    def __init__(self, parts: Iterable[BucketPart], results: Sequence[Tensor], pending: set[Handle]) -> None:
        self._parts = deque(parts)
        self._results: Sequence[Tensor] | None = results  # a part may fill it
        self._pending = pending
        pending.add(self)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the results, one for each parameter of the bucket, in order. Raise if the backend failed, or on a
        second call."""
        if self._results is None:
            raise RuntimeError("this handle was already waited for; call wait once per launch")
        self.settle()
        results, self._results = self._results, None
        return tuple(results)

    def settle(self) -> None:
        """Wait for all messages and drop the inputs. A later ``wait`` returns the results."""
        while self._parts:
            self._parts.popleft().finish()  # removed first: a failed message must not be waited for again
        self._pending.discard(self)


SENDER, AVERAGER = "sender", "averager"
EXIT_SECONDS = 1.0  # an exiting rank waits this long for its threads


class Task(Generic[Result]):
    """A task of a background thread. Waiting for it blocks on a lock, since a ``Future`` costs ten times as much."""

    __slots__ = "_call", "_error", "_lock", "_result"

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._error: BaseException | None = None
        self._result: Any = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def run(self) -> None:
        """Run the task, on the background thread, and drop its references."""
        call, self._call = self._call, None
        assert call is not None, "a task runs once"
        try:
            self._result = call()
        except BaseException as error:
            self._error = error
        finally:
            del call, self  # otherwise the error's traceback would keep them alive

    def end(self) -> None:
        """Wake the threads that wait for the task."""
        self._lock.release()

    def wait(self, timeout: float) -> None:
        """Wait until the task has ended, at most ``timeout`` seconds."""
        if self._lock.acquire(timeout=timeout):
            self._lock.release()

    def result(self) -> Result:
        """Wait until the task has ended; return its result, or raise its error."""
        with self._lock:
            error = self._error
        if error is None:
            return self._result  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error, self  # otherwise the error's traceback would keep them alive


def in_background(thread: str, call: Callable[[], Result]) -> Task[Result]:
    """Run a task on the named thread, after all earlier tasks of the thread."""
    task = Task(call)
    _thread_of(thread).give(task)
    return task


class _Background:
    """A background thread that all transports share, since messages must be sent in the same order on all ranks.

    The thread is a daemon, so that a failed rank can exit while the thread waits for peers.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any]] = SimpleQueue()
        threading.Thread(target=self._serve, name=f"thunder_zero {name}", daemon=True).start()

    def give(self, task: Task[Any]) -> None:
        """Run a task after all earlier tasks."""
        self._tasks.put(task)

    def _serve(self) -> None:
        wait_for_a_core(threading.get_native_id())  # otherwise each bucket would interrupt a computing thread
        while True:
            task = self._tasks.get()
            task.run()
            task.end()
            del task


@cache
def _thread_of(name: str) -> _Background:
    at_exit(_let_end, name)
    return _Background(name)


def _let_end(thread: str) -> None:
    """Give the thread time to notice lost peers; called at exit. Stopping it later would not be clean."""
    in_background(thread, lambda: None).wait(EXIT_SECONDS)

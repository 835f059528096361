"""Defines handles of launched buckets, and two threads: one posts messages, one averages.

::

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
    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the collective has ended; return one tensor for each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitsBy:
    """A handle whose ``wait`` calls a given function, such as a wrapper of another handle's wait, at most once."""

    wait: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BucketPart:
    # functions that return when a message has ended, or raise if it failed. They are called in order.
    waits: Iterable[Callable[[], object]]
    then: Callable[[], object] | None = None  # a function that does local work on the received data

    def finish(self) -> None:
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
        """Return the results, one for each parameter of the bucket, in order. A second call raises."""
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
        """Run the task, on the background thread, drop its references, and wake the threads that wait."""
        call, self._call = self._call, None
        assert call is not None, "a task runs once"
        try:
            self._result = call()
        except BaseException as error:
            self._error = error
        lock = self._lock
        del call, self  # otherwise the error's traceback would keep them alive
        lock.release()

    def result(self) -> Result:
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
    _tasks_of(thread).put(task)
    return task


@cache
def _tasks_of(thread: str) -> SimpleQueue[Task[Any]]:
    """Start a thread, and return the queue of its tasks.

    All transports share the thread, since messages must be sent in the same order on all ranks. It is a daemon, so that
    a failed rank can exit while the thread waits for peers.
    """
    at_exit(_let_end, thread)
    tasks: SimpleQueue[Task[Any]] = SimpleQueue()
    threading.Thread(target=_serve, args=(tasks,), name=f"thunder_zero {thread}", daemon=True).start()
    return tasks


def _serve(tasks: SimpleQueue[Task[Any]]) -> None:
    wait_for_a_core(threading.get_native_id())  # otherwise each bucket would interrupt a computing thread
    while True:
        tasks.get().run()


def _let_end(thread: str) -> None:
    """Give the thread time to notice lost peers; called at exit. Stopping it later would not be clean."""
    ended = threading.Event()
    in_background(thread, ended.set)
    ended.wait(EXIT_SECONDS)

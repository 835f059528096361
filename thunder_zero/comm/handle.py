"""Handles of launched buckets, and the two background threads: one posts messages, one averages.

A handle is waited for once, and keeps its tensors alive until then. A thread runs its tasks in the order given::

    launch     Handle(parts, results)     each part: messages in flight, then local work, such as a mean
    wait()     parts end, in order        -> results, one tensor for each parameter of the bucket
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

from thunder_zero.compat.torch_gaps import at_exit

Result = TypeVar("Result")


class Waitable(Protocol):
    """A launched collective of one bucket."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for its end; returns one tensor for each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitsBy:
    """A handle that waits by a function, to be called once: for another handle, with what comes before or after."""

    wait: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A part of a bucket that finishes independently: each of ``waits``, in order, returns when its message has ended,
    or raises if it failed; ``then`` is local work on the received data."""

    waits: Iterable[Callable[[], object]]
    then: Callable[[], object] | None = None

    def finish(self) -> None:
        """Wait for all messages, then do the local work."""
        for wait in self.waits:
            wait()
        if self.then is not None:
            self.then()


class Handle:
    """One launched bucket. It keeps every tensor alive that the backend still reads or writes.

    The transport that launched it holds it in ``pending`` until it has ended, so that dropping a handle
    never frees memory that the backend still writes to.
    """

    def __init__(self, parts: Iterable[BucketPart], results: Sequence[Tensor], pending: set[Handle]) -> None:
        self._parts = deque(parts)
        self._results: Sequence[Tensor] | None = results  # a part may make them
        self._pending = pending
        pending.add(self)

    def wait(self) -> tuple[Tensor, ...]:
        """The results, one for each parameter of the bucket, in order; raises if the backend failed. Call it once."""
        if self._results is None:
            raise RuntimeError("this handle was already waited for; call wait once per launch")
        self.settle()
        results, self._results = self._results, None
        return tuple(results)

    def settle(self) -> None:
        """Wait for all messages and drop the inputs; ``wait`` still returns the results."""
        while self._parts:
            self._parts.popleft().finish()  # removed first: a message that failed must not be waited for again
        self._pending.discard(self)


SENDER, AVERAGER = "sender", "averager"
EXIT_SECONDS = 1.0  # how long an exiting rank waits for them


def in_background(thread: str, task: Callable[[], Result]) -> Future[Result]:
    """Run a task in the named thread, after all tasks that were given to it earlier."""
    future: Future[Result] = Future()
    _thread_of(thread).give(task, future)
    return future


def at_once(thread: str, task: Callable[[], None]) -> Callable[[], None]:
    """Run a short task in its place among those of the named thread: here, if that has nothing to do, which spares two
    changes of threads and the fight for the interpreter's lock. Return what waits for its end, and raises its error."""
    if not _thread_of(thread).is_idle:
        return in_background(thread, task).result
    try:
        task()
    except Exception as error:
        return partial(_raise, error)
    return _nothing


def _raise(error: Exception) -> NoReturn:
    raise error


def _nothing() -> None:
    """Wait for what has ended."""


class _Background:
    """A background thread, one for all transports: messages under a tag must leave in the same order on all ranks. It
    is a daemon, so that a rank that fails can exit while the thread waits for its peers."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock, self._given, self._ended = threading.Lock(), 0, 0
        threading.Thread(target=self._serve, name=f"thunder_zero {name}", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether all tasks that were given to it have ended."""
        return self._given == self._ended

    def give(self, task: Callable[[], Any], future: Future[Any]) -> None:
        """Run a task after the earlier ones."""
        with self._lock:
            self._given += 1
            self._tasks.put((task, future))

    def _serve(self) -> None:
        while True:
            task, future = self._tasks.get()
            result, failure = None, None
            try:
                result = task()
            except BaseException as error:
                failure = error
            del task  # before the future is done: the tensors that it held must be free by then
            self._ended += 1
            if failure is None:
                future.set_result(result)
            else:
                future.set_exception(failure)
            del future, result, failure


@cache
def _thread_of(name: str) -> _Background:
    at_exit(_let_end, name)
    return _Background(name)


def _let_end(thread: str) -> None:
    """At exit: give the thread time to notice lost peers; the interpreter cannot stop it cleanly later."""
    futures.wait([in_background(thread, lambda: None)], timeout=EXIT_SECONDS)

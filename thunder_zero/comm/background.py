"""Two background threads, which run tasks in the order given: one posts messages, one averages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any

from thunder_zero.comm.handle import Result
from thunder_zero.compat.exit import at_exit

COURIER, AVERAGER = "courier", "averager"
EXIT_SECONDS = 1.0  # how long an exiting rank waits for them


def in_background(thread: str, task: Callable[[], Result]) -> Future[Result]:
    """Run a task in the named thread, after all tasks that were given to it earlier."""
    future: Future[Result] = Future()
    _tasks_of(thread).put((task, future))
    return future


@cache
def _tasks_of(thread: str) -> SimpleQueue[tuple[Callable[[], Any], Future[Any]]]:
    """The queue of a background thread, which starts when it is first needed.

    One thread serves all transports of the process: messages under a tag must leave in the same order on all
    ranks. It is a daemon, so that a rank that fails can exit while the thread waits for its peers.
    """
    tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
    threading.Thread(target=_serve, args=(tasks,), name=f"thunder_zero {thread}", daemon=True).start()
    at_exit(_let_end, thread)
    return tasks


def _serve(tasks: SimpleQueue[tuple[Callable[[], Any], Future[Any]]]) -> None:
    while True:
        task, future = tasks.get()
        result, failure = None, None
        try:
            result = task()
        except BaseException as error:
            failure = error
        del task  # before the future is done: the tensors that it held must be free by then
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)
        del future, result, failure


def _let_end(thread: str) -> None:
    """At exit: give the thread time to notice lost peers; the interpreter cannot stop it cleanly later."""
    futures.wait([in_background(thread, lambda: None)], timeout=EXIT_SECONDS)

"""Handles of launched buckets: each is waited for once, and keeps its tensors alive until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Waitable(Protocol):
    """A launched collective of one bucket."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for its end; returns one tensor for each parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class WaitsBy:
    """A handle that waits by a function: for another handle, with what comes before or after.

    Attributes:
        wait: the function, to be called once.
    """

    wait: Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A part of a bucket that finishes independently.

    Attributes:
        waits: called in order; each returns when its message has ended, and raises if it failed.
        then: local work on the received data.
    """

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

    def __init__(self, parts: Iterable[BucketPart], results: tuple[Tensor, ...], pending: set[Handle]) -> None:
        self._parts = deque(parts)
        self._results: tuple[Tensor, ...] | None = results
        self._pending = pending
        pending.add(self)

    def wait(self) -> tuple[Tensor, ...]:
        """The results, one for each parameter of the bucket, in its order. Call it once.

        Raises:
            RuntimeError: called a second time, or the backend failed (a peer died, a timeout).
        """
        if self._results is None:
            raise RuntimeError("this handle was already waited for; call wait once per launch")
        self.settle()
        results, self._results = self._results, None
        return results

    def settle(self) -> None:
        """Wait for all messages and drop the inputs; ``wait`` still returns the results."""
        while self._parts:
            self._parts.popleft().finish()  # removed first: a message that failed must not be waited for again
        self._pending.discard(self)


def drain(pending: set[Handle]) -> None:
    """Wait for all that a failed step left in flight.

    Raises:
        RuntimeError: the backend failed; the remaining handles stay pending.
    """
    while pending:
        next(iter(pending)).settle()

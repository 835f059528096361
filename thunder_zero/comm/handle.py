"""What is under way: one handle a launched bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result")


class Waitable(Protocol):
    """What is under way."""

    def wait(self) -> tuple[Tensor, ...]:
        """End it; one tensor a parameter."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a bucket that can be finished by itself.

    Attributes:
        waits: called in order; each returns when its message has ended, and raises if it failed.
        then: local work on what has arrived.
    """

    waits: Iterable[Callable[[], object]]
    then: Callable[[], object] | None = None

    def finish(self) -> None:
        """Wait for all, then do the local work."""
        for wait in self.waits:
            wait()
        if self.then is not None:
            self.then()


class Handle:
    """One launched bucket. It keeps alive every tensor that the backend still reads or writes.

    The transport that launched it holds it in ``pending`` until it is over, so that dropping a handle
    never frees memory that is still written to.
    """

    def __init__(self, steps: Iterable[Step], results: tuple[Tensor, ...], pending: set[Handle]) -> None:
        self._steps = deque(steps)
        self._results: tuple[Tensor, ...] | None = results
        self._pending = pending
        pending.add(self)

    def wait(self) -> tuple[Tensor, ...]:
        """The results, one for each parameter of the bucket, in its order. To be called once.

        Raises:
            RuntimeError: called a second time, or the backend failed (a peer died, a time-out).
        """
        if self._results is None:
            raise RuntimeError("this handle was waited for already; a launch is waited for once")
        self.settle()
        results, self._results = self._results, None
        return results

    def settle(self) -> None:
        """End what is under way and drop the inputs; the results can still be taken with ``wait``."""
        while self._steps:
            self._steps.popleft().finish()  # taken out first: a message that failed must not be waited for again
        self._pending.discard(self)


def drain(pending: set[Handle]) -> None:
    """End all that a failed step left under way.

    Raises:
        RuntimeError: the backend failed; what is left stays pending.
    """
    while pending:
        next(iter(pending)).settle()

"""What a gradient accumulation has deferred so far."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor


class Accumulation:
    """The full gradients that ``no_sync`` has deferred, by the paths of their parameters.

    Attributes:
        synced: whether the gradients of a forward that runs now are reduced; otherwise that is deferred.
    """

    def __init__(self) -> None:
        self.synced = True
        self._deferred: dict[str, Tensor] = {}
        self._has_new = False

    @property
    def paths(self) -> Collection[str]:
        """Whose gradients wait for a reduction."""
        return self._deferred.keys()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that wait."""
        return sum(grad.nbytes for grad in self._deferred.values())

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Forwards inside of the block have the reduction of their gradients deferred."""
        before, self.synced = self.synced, False
        try:
            yield
        finally:
            self.synced = before

    def defer(self, grad: Tensor, path: str) -> None:
        """Keep a full gradient, added to what is there already."""
        self._has_new = True
        deferred = self.take(path)
        # A clone: the gradient may be a view, or somebody else's.
        self._deferred[path] = grad.clone() if deferred is None else deferred.add_(grad)

    def take(self, path: str) -> Tensor | None:
        """What was deferred of a parameter's gradient, which is then no longer."""
        return self._deferred.pop(path, None)

    def take_news(self) -> bool:
        """Whether there was a backward under ``no_sync`` since this was asked last."""
        news, self._has_new = self._has_new, False
        return news

    def drop(self) -> None:
        """Forget all of it."""
        self._deferred.clear()
        self._has_new = False

"""The gradients that ``no_sync`` has deferred so far."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor


class Accumulation:
    """Full gradients that wait for their reduction, by the paths of their parameters.

    Args:
        synced: whether gradients are reduced outside of all blocks.
    """

    def __init__(self, *, synced: bool = True) -> None:
        self._synced = synced
        self._deferred: dict[str, Tensor] = {}
        self._grew = False

    @property
    def synced(self) -> bool:
        """Whether the gradients of a forward that runs now are reduced; otherwise they are deferred."""
        return self._synced

    @property
    def paths(self) -> Collection[str]:
        """The parameters with deferred gradients."""
        return self._deferred.keys()

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        """Defer the gradients of forwards inside of the block."""
        before, self._synced = self._synced, False
        try:
            yield
        finally:
            self._synced = before

    def defer(self, grad: Tensor, path: str) -> None:
        """Add a full gradient to the parameter's deferred one."""
        self._grew = True
        deferred = self.take(path)
        # A clone: the gradient may be a view, or somebody else's.
        self._deferred[path] = grad.clone() if deferred is None else deferred.add_(grad)

    def take(self, path: str) -> Tensor | None:
        """Remove and return a parameter's deferred gradient; None if there is none."""
        return self._deferred.pop(path, None)

    def grew_since_asked(self) -> bool:
        """Whether a backward under ``no_sync`` ran since the last call of this."""
        grew, self._grew = self._grew, False
        return grew

    def drop(self) -> None:
        """Forget all deferred gradients."""
        self._deferred.clear()
        self._grew = False

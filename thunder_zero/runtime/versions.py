"""Finds the shards that were written to since they were noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor


class Versions:
    """Which shards changed since they were noted.

    Fused optimizers do not raise a tensor's version; their steps are reported by ``optimizer_hooks.py``.
    """

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = shards
        self._noted: dict[str, int] = {}

    def note(self, paths: Iterable[str]) -> None:
        """Take these shards as they are now."""
        self._noted.update((path, self._shards[path]._version) for path in paths)

    def changed(self, path: str) -> bool:
        """Whether a shard was written to since it was noted."""
        return self._shards[path]._version != self._noted[path]

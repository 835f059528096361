"""Finds the shards that were written to since they were noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from thunder_zero.runtime.dtensors import local


class Versions:
    """Which shards changed since they were noted.

    An operator in place raises a DTensor's own version, and code that takes its local tensor that one's. Fused
    optimizers raise neither; their steps are reported by ``optimizer_hooks.py``.
    """

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        self._shards = shards
        self._noted: dict[str, tuple[int, int]] = {}

    def note(self, paths: Iterable[str]) -> None:
        """Take these shards as they are now."""
        self._noted.update((path, self._version(path)) for path in paths)

    def changed(self, path: str) -> bool:
        """Whether a shard was written to since it was noted."""
        return self._version(path) != self._noted[path]

    def _version(self, path: str) -> tuple[int, int]:
        shard = self._shards[path]
        return shard._version, local(shard)._version

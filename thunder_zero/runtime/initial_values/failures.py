"""Postpones a rank's failure until the others can hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """Remembers the first failure until all ranks are where they can hear of it."""

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Remember what the block raises instead of raising it."""
        try:
            yield
        except Exception as failure:
            self._first = self._first or failure

    def raise_first(self) -> None:
        """Raise the first failure, if there was one."""
        if self._first is not None:
            raise self._first

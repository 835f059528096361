"""Torch's own operators, one line each way, in place of what Thunder's autodiff decomposes."""

from __future__ import annotations

from thunder.core.symbol import BoundSymbol


class NeverFuses:
    """In front of a class of Thunder's executors: without this method Thunder would search the subsymbols of lines."""

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Never."""
        return False

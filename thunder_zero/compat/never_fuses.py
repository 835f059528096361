"""needed while: Thunder asks each executor whether it fuses the subsymbols of a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder.core.symbol import BoundSymbol


class NeverFuses:
    """A mix-in for executors that fuse nothing. Thunder then does not search the subsymbols of each line."""

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Return False."""
        return False

"""needed while: Thunder asks each executor whether it fuses what a line is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder.core.symbol import BoundSymbol


class NeverFuses:
    """A mix-in for executors that fuse nothing. It spares Thunder the search of each line's subsymbols."""

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Return False."""
        return False

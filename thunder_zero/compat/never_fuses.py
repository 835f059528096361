"""needed while: Thunder asks each executor whether it fuses what a line is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder.core.symbol import BoundSymbol


class NeverFuses:
    """Stands in front of a class of Thunder's executors, and spares the search of the subsymbols of each line."""

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Never."""
        return False

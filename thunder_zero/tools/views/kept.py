"""``tz.tools.kept_for_backward``: which units keep the most bytes for backward."""

from __future__ import annotations

from collections import Counter

from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.table.table import Table


def kept_for_backward(table: Table) -> dict[str, int]:
    """Return the bytes that forward saves for backward, keyed by the unit that computes them, largest first."""
    if table.memory is None:
        raise ValueError(f"the table has no forecast of memory: {table.no_memory}")
    kept = Counter[str]()
    for row in table.rows(where=lambda row: row.phase == "forward"):
        kept[row.unit] += row.allocated.get(Holds.SAVED, 0)
    return {unit: nbytes for unit, nbytes in kept.most_common() if nbytes}

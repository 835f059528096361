"""Which layers keep the most bytes for backward: an example of a question to the table."""

from __future__ import annotations

from collections import Counter

from thunder_zero.tools.forecast.figures import Holds
from thunder_zero.tools.table.table import Table


def kept_for_backward(table: Table) -> dict[str, int]:
    """Return the bytes that forward saves for backward, keyed by the unit that computes them, largest first."""
    kept: Counter[str] = Counter()
    for row in table.lines:
        if row.phase == "forward":
            kept[row.unit] += row.allocated.get(Holds.SAVED, 0)
    return {unit: nbytes for unit, nbytes in kept.most_common() if nbytes}

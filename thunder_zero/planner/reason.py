"""Says in one sentence why a row of the table is recommended, or what keeps all from fitting."""

from __future__ import annotations

from collections.abc import Sequence

from thunder_zero.forecast.kinds import Holds
from thunder_zero.planner.figures import Row
from thunder_zero.report.trace_printer import size

SHARDED = (Holds.PARAMETER, Holds.OPTIMIZER, Holds.REDUCED_GRADIENT)
OF_BATCH = (Holds.INPUT, Holds.SAVED, Holds.TEMPORARY, Holds.LOSS, Holds.WORKSPACE)
MUCH_SLOWER = 0.98


def reason_of(rows: Sequence[Row], chosen: Row | None, memory_bytes: int) -> str:
    """One sentence."""
    if chosen is None:
        return _nothing_fits(rows, memory_bytes)
    fitting = [row for row in rows if row.fits]
    only = "the only one that fits" if len(fitting) == 1 else f"the fastest of {len(fitting)} that fit"
    others = [text for text in (_too_large(rows, chosen, memory_bytes), _slower(fitting, chosen)) if text]
    because = f": {', and '.join(others)}" if others else ""
    return f"{chosen.name} ranks is {only} into {size(memory_bytes)}{because}"


def _too_large(rows: Sequence[Row], chosen: Row, memory_bytes: int) -> str:
    """What a lower stage would take."""
    lower = [row for row in rows if not row.fits and row.stage < chosen.stage]
    if not lower:
        return ""
    least = min(lower, key=lambda row: row.needed_bytes)
    return f"{least.name} would take {size(least.needed_bytes)}"


def _slower(fitting: Sequence[Row], chosen: Row) -> str:
    """How much slower the next is, and what it waits for."""
    slower = [row for row in fitting if row.tokens_per_second < MUCH_SLOWER * chosen.tokens_per_second]
    if not slower:
        return ""
    one = max(slower, key=lambda row: row.tokens_per_second)
    less = 1 - one.tokens_per_second / chosen.tokens_per_second
    waits = one.exposed_seconds - chosen.exposed_seconds
    computes = one.compute_seconds - chosen.compute_seconds
    what = (
        f"{milliseconds(waits)} more of communication are exposed"
        if waits >= computes
        else f"it computes {milliseconds(computes)} longer"
    )
    return f"{one.name} is {less:.0%} slower, where {what}"


def milliseconds(seconds: float) -> str:
    """``12.3 ms``; seconds from one second on."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _nothing_fits(rows: Sequence[Row], memory_bytes: int) -> str:
    """The least that was found, and which lever would help."""
    least = min(rows, key=lambda row: row.needed_bytes)
    over = least.needed_bytes - memory_bytes
    sharded = sum(least.by_kind.get(kind, 0) for kind in SHARDED)
    batch = sum(least.by_kind.get(kind, 0) for kind in OF_BATCH)
    levers = {"twice the ranks": sharded // 2, "half the batch": batch // 2}
    offers = ", ".join(f"{what} saves about {size(nbytes)}" for what, nbytes in levers.items() if nbytes)
    return (
        f"nothing fits into {size(memory_bytes)}: the least, {least.name} ranks with recompute={least.recompute!r}, "
        f"takes {size(least.needed_bytes)}, {size(over)} more; {offers}"
    )

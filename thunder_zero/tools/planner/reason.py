"""Says in one sentence why a row of the table is recommended, or what keeps all from fitting."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from thunder_zero.amounts import duration, size
from thunder_zero.policy import RECOMPUTE, STAGES
from thunder_zero.tools.forecast.kinds import Holds
from thunder_zero.tools.planner.figures import Row

SHARDED = (Holds.PARAMETER, Holds.OPTIMIZER, Holds.REDUCED_GRADIENT)
OF_BATCH = (Holds.INPUT, Holds.SAVED, Holds.TEMPORARY, Holds.LOSS, Holds.WORKSPACE)
AS_FAST = 0.995  # of the fastest: below that share of its tokens a second, nothing makes up for it
MUCH_SLOWER = 0.98


def reason_of(rows: Sequence[Row], chosen: Row | None, memory_bytes: int, batch: int) -> str:
    """One sentence; ``batch``: rows of a rank's inputs, 1 if the caller cannot choose them."""
    if chosen is None:
        return _nothing_fits(rows, memory_bytes, batch)
    fitting = [row for row in rows if row.fits]
    others = [text for text in (_too_large(rows, chosen, memory_bytes), _slower(fitting, chosen)) if text]
    because = f": {', and '.join(others)}" if others else ""
    return f"{chosen.name_with_ranks} is {_best(rows, fitting, chosen, size(memory_bytes))}{because}"


def _best(rows: Sequence[Row], fitting: Sequence[Row], chosen: Row, memory: str) -> str:
    """What sets the row apart."""
    if len(rows) == 1:
        return f"the only one that was compared, and fits into {memory}"
    if len(fitting) == 1:
        return f"the only one that fits into {memory}"
    fastest = f"the fastest of {len(fitting)} that fit into {memory}"
    if chosen.tokens_per_second == max(row.tokens_per_second for row in fitting):
        return fastest
    return f"within {1 - AS_FAST:.1%} of {fastest}, and needs the least memory of those"


def _too_large(rows: Sequence[Row], chosen: Row, memory_bytes: int) -> str:
    """What a lower stage would take."""
    lower = [row for row in rows if not row.fits and row.stage < chosen.stage]
    if not lower:
        return ""
    least = min(lower, key=lambda row: row.needed_bytes)
    return f"{least.name} would take {size(least.needed_bytes)}"


def _slower(fitting: Sequence[Row], chosen: Row) -> str:
    """How much slower the next is, and the part of its step that grows most."""
    slower = [row for row in fitting if row.tokens_per_second < MUCH_SLOWER * chosen.tokens_per_second]
    if not slower:
        return ""
    one = max(slower, key=lambda row: row.tokens_per_second)
    less = 1 - one.tokens_per_second / chosen.tokens_per_second
    parts = {
        "{} more of communication are exposed": one.exposed_seconds - chosen.exposed_seconds,
        "it computes {} longer": one.compute_seconds - chosen.compute_seconds,
        "the loss takes {} longer": one.loss_seconds - chosen.loss_seconds,
        "the optimizer takes {} longer": one.optimizer_seconds - chosen.optimizer_seconds,
    }
    what = max(parts, key=parts.__getitem__)
    again = ""
    if RECOMPUTE.index(one.recompute) > RECOMPUTE.index(chosen.recompute):
        link = "as" if "computes" in what else "and"
        again = f", {link} it has to recompute={one.recompute!r} to fit"
    return f"{one.name} is {less:.0%} slower, where {what.format(duration(parts[what]))}{again}"


def _nothing_fits(rows: Sequence[Row], memory_bytes: int, batch: int) -> str:
    """The least that was found, and which lever alone would help."""
    least = min(rows, key=lambda row: row.needed_bytes)
    over = least.needed_bytes - memory_bytes
    sharded = sum(least.by_kind.get(kind, 0) for kind in SHARDED) * STAGES[least.stage].sharded
    of_batch = sum(least.by_kind.get(kind, 0) for kind in OF_BATCH) * (least.peak_half != "optimizer step")
    offers = []
    if sharded > over:  # of N times the ranks, each holds 1/N of it
        ranks = ceil(least.mesh.ranks * sharded / (sharded - over))
        offers.append(f"about {ranks:,} ranks would be needed, as they share {size(sharded)} of it")
    if of_batch * (batch - 1) // batch >= over:
        offers.append(f"half the batch saves about {size(of_batch // 2)}")
    return (
        f"nothing fits into {size(memory_bytes)}: the least, {least.name_with_ranks} with "
        f"recompute={least.recompute!r}, takes {size(least.needed_bytes)}, {size(over)} more; "
        f"{', '.join(offers) or 'neither more ranks nor a smaller batch alone would help'}"
    )

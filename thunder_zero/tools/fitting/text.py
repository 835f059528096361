"""What ``tz.tools.fit`` says: the trade-off between memory and work, or why nothing fits.

::

        peak      sent  done again  units kept  again  in flight  cost
     100 MiB  50.0 MiB  1.50 GFLOP           1      2   4.00 MiB  1.50  ████████████████
     120 MiB  40.0 MiB                       3      0   4.00 MiB  1.00  █ <- chosen
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from thunder_zero.plan.amounts import size
from thunder_zero.tools.fitting.candidate import Candidate
from thunder_zero.tools.forecast.figures import OF_BATCH, SHARDED, Memory
from thunder_zero.tools.printing.text import table_of

COLUMNS = ("peak", "sent", "done again", "units kept", "again", "in flight", "cost", "")
BAR = 16  # columns of the longest bar


Shown = tuple[int, Candidate, bool]  # bytes at the peak, the schedule, and whether it is the answer


def print_trade_off(rows: Sequence[Shown], console: Console) -> None:
    """Print the choices, least memory first, with the cost of each over the least; the bars show the difference.
    Of rows with equal figures, one is printed."""
    costs = [one.cost for _, one, _ in rows]
    least, spread = min(costs, default=0), max(costs, default=0) - min(costs, default=0)
    printed: dict[tuple[str, ...], str] = {}
    for peak, one, chosen in rows:
        figures = _figures(peak, one, least)
        if chosen or figures not in printed:
            bar = "█" * max(round(BAR * (one.cost - least) / (spread or 1)), 1)
            printed[figures] = bar + " <- chosen" * chosen
    console.print(table_of(COLUMNS, [(*cells, end) for cells, end in printed.items()]))


def _figures(peak: int, one: Candidate, least: float) -> tuple[str, ...]:
    """As they are printed; the cost over the least one."""
    plan = one.timeline.plan
    flops = f"{one.flops / 1e9:.2f} GFLOP" if one.flops else ""
    counts = str(len(one.kept)), str(len(plan.recomputed)), size(plan.sizes.in_flight_bytes)
    return size(peak), size(one.sent), flops, *counts, f"{one.cost / (least or 1):.2f}"


@dataclass(frozen=True, slots=True)
class Least:
    """The least memory that was found.

    Attributes:
        nbytes: at its peak.
        recomputed: number of units that are computed again whole; None for a model without units.
        saved_by_units: bytes that computing all units again saves, and nothing else changed, of the policy as asked
            for; below 0 if it adds some.
        saved_by_cheap: bytes that ``recompute="cheap"`` saves, of a policy that asks for ``"none"``.
    """

    nbytes: int
    recomputed: int | None
    saved_by_units: int
    saved_by_cheap: int
    in_flight_bytes: int


def refusal(as_asked: Memory, least: Least, memory_bytes: int) -> str:
    """What is missing, what makes the peak, and what would help."""
    where = " (in the optimizer's step)" if least.nbytes == (as_asked.optimizer_step or 0) else ""
    at = as_asked.by_kind
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(at.items())[:3])
    sharded, batch = (sum(at.get(kind, 0) for kind in kinds) for kinds in (SHARDED, OF_BATCH))
    helps = {
        "twice the ranks": sharded // 2,
        "half the batch": batch // 2,
        "cpu_offload on GPUs": 0 if as_asked.plan.policy.cpu_offload or as_asked.plan.mesh.is_sliced else sharded,
        'recompute="cheap"': max(least.saved_by_cheap, 0),
    }
    offers = ", ".join(f"{what} (about {size(nbytes)} less)" for what, nbytes in helps.items() if nbytes)
    return (
        f"no policy fits into {size(memory_bytes)}: the least that was found takes {size(least.nbytes)}{where}, "
        f"{size(least.nbytes - memory_bytes)} more, with {_with(least)}; "
        f"the peak as asked for, {size(as_asked.peak)}, has {kinds}; what would help: {offers}"
    )


def _with(least: Least) -> str:
    """How the least memory comes about, and what computing units again has to do with it."""
    in_flight = f"{size(least.in_flight_bytes)} in flight"
    if least.recomputed is None:
        return in_flight
    gain = least.saved_by_units
    what = f"takes {size(abs(gain))} {'less' if gain > 0 else 'more'} than" if gain else "takes as much as"
    units = (
        f"{least.recomputed} unit{'s' * (least.recomputed > 1)} computed again"
        if least.recomputed
        else "no unit computed again"
    )
    return f'{units} (recompute="units" {what} the policy as asked for) and {in_flight}'

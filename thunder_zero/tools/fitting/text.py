"""Prints the result of ``tz.tools.fit``: a table of memory and work, or why no policy fits.

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


TradeOffRow = tuple[int, Candidate, bool]  # bytes at the peak, the schedule, and whether it was chosen


def print_trade_off(rows: Sequence[TradeOffRow], console: Console) -> None:
    """Print the candidates, least memory first. Bars show the costs relative to the least cost.

    Rows with equal figures are printed once.
    """
    costs = [candidate.cost for _, candidate, _ in rows]
    least, spread = min(costs, default=0), max(costs, default=0) - min(costs, default=0)
    printed: dict[tuple[str, ...], str] = {}
    for peak, candidate, is_chosen in rows:
        figures = _figures(peak, candidate, least)
        if is_chosen or figures not in printed:
            bar = "█" * max(round(BAR * (candidate.cost - least) / (spread or 1)), 1)
            printed[figures] = bar + " <- chosen" * is_chosen
    console.print(table_of(COLUMNS, [(*cells, end) for cells, end in printed.items()]))


def _figures(peak: int, candidate: Candidate, least: float) -> tuple[str, ...]:
    """Return the cells of a candidate's row. The last cell is the cost relative to the least cost."""
    plan = candidate.timeline.plan
    flops = f"{candidate.flops / 1e9:.2f} GFLOP" if candidate.flops else ""
    counts = str(len(candidate.kept)), str(len(plan.recomputed)), size(plan.sizes.in_flight_bytes)
    return size(peak), size(candidate.sent), flops, *counts, f"{candidate.cost / (least or 1):.2f}"


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """The compiled policy that takes the least memory."""

    nbytes: int  # bytes at the peak
    recomputed: int | None  # number of units that are recomputed as a whole; None for a model without units
    # bytes by which the requested policy's peak shrinks if all units are recomputed. Negative if the peak grows.
    saved_by_units: int
    saved_by_cheap: int  # bytes that ``recompute="cheap"`` saves if the requested policy has ``"none"``; otherwise 0
    in_flight_bytes: int  # bytes in flight


def refusal(as_asked: Memory, least: LeastMemory, memory_bytes: int) -> str:
    """Return a sentence with the missing bytes, the contents of the peak, and possible remedies."""
    step_text = " (in the optimizer's step)" if least.nbytes == (as_asked.optimizer_step or 0) else ""
    at_peak = as_asked.by_kind
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(at_peak.items())[:3])
    sharded, batch = (sum(at_peak.get(kind, 0) for kind in kinds) for kinds in (SHARDED, OF_BATCH))
    remedies = {
        "twice the ranks": sharded // 2,
        "half the batch": batch // 2,
        "cpu_offload on GPUs": 0 if as_asked.plan.policy.cpu_offload or as_asked.plan.mesh.is_sliced else sharded,
        'recompute="cheap"': max(least.saved_by_cheap, 0),
    }
    offers = ", ".join(f"{remedy} (about {size(nbytes)} less)" for remedy, nbytes in remedies.items() if nbytes)
    return (
        f"no policy fits into {size(memory_bytes)}: the least that was found takes {size(least.nbytes)}{step_text}, "
        f"{size(least.nbytes - memory_bytes)} more, with {_choices_of(least)}; "
        f"the peak as asked for, {size(as_asked.peak)}, has {kinds}; what would help: {offers}"
    )


def _choices_of(least: LeastMemory) -> str:
    """Describe the choices that take the least memory, and the effect of recomputing units."""
    in_flight = f"{size(least.in_flight_bytes)} in flight"
    if least.recomputed is None:
        return in_flight
    gain = least.saved_by_units
    comparison = f"takes {size(abs(gain))} {'less' if gain > 0 else 'more'} than" if gain else "takes as much as"
    units = (
        f"{least.recomputed} unit{'s' * (least.recomputed > 1)} computed again"
        if least.recomputed
        else "no unit computed again"
    )
    return f'{units} (recompute="units" {comparison} the policy as asked for) and {in_flight}'

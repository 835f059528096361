"""Prints the result of ``tz.tools.fit``: a table of memory and work, or why no policy fits.

::

        peak      sent  done again  units kept  again  in flight  cost
     100 MiB  50.0 MiB  1.50 GFLOP           1      2   4.00 MiB  1.50  ████████████████
     120 MiB  40.0 MiB                       3      0   4.00 MiB  1.00  █ <- chosen
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from thunder_zero.plan.amounts import size
from thunder_zero.tools.forecast.figures import OF_BATCH, SHARDED, Memory
from thunder_zero.tools.plan.candidate import Candidate
from thunder_zero.tools.printing.text import table_of

COLUMNS = ("peak", "sent", "done again", "units kept", "again", "in flight", "cost", "")
BAR = 16  # columns of the longest bar


def print_trade_off(rows: Sequence[Candidate], chosen: Candidate, console: Console) -> None:
    """Print the candidates, least memory first. Bars show the costs relative to the least cost.

    Rows with equal figures are printed once.
    """
    costs = [candidate.cost for candidate in rows]
    least, spread = min(costs, default=0), max(costs, default=0) - min(costs, default=0)
    printed: dict[tuple[str, ...], str] = {}
    for candidate in rows:
        figures = _figures(candidate, least)
        if candidate is chosen or figures not in printed:
            bar = "█" * max(round(BAR * (candidate.cost - least) / (spread or 1)), 1)
            printed[figures] = bar + " <- chosen" * (candidate is chosen)
    console.print(table_of(COLUMNS, [(*cells, end) for cells, end in printed.items()]))


def _figures(candidate: Candidate, least: float) -> tuple[str, ...]:
    """Return the cells of a candidate's row. The last cell is the cost relative to the least cost."""
    plan = candidate.timeline.plan
    flops = f"{candidate.flops / 1e9:.2f} GFLOP" if candidate.flops else ""
    counts = str(len(candidate.kept)), str(len(plan.recomputed)), size(plan.sizes.in_flight_bytes)
    return size(candidate.peak), size(candidate.sent), flops, *counts, f"{candidate.cost / (least or 1):.2f}"


def refusal(as_asked: Memory, least: Candidate, by_cheap: int, memory_bytes: int) -> str:
    """Return a sentence with the missing bytes, the contents of the peak, and possible remedies.

    ``by_cheap`` is what the requested policy saves with ``recompute="cheap"``.
    """
    nbytes = max(least.peak, as_asked.optimizer_step or 0)
    step_text = " (in the optimizer's step)" if nbytes == as_asked.optimizer_step else ""
    at_peak, policy = as_asked.by_kind, as_asked.plan.policy
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(at_peak.items())[:3])
    sharded, batch = (sum(at_peak.get(kind, 0) for kind in kinds) for kinds in (SHARDED, OF_BATCH))
    remedies = {
        "twice the ranks": sharded // 2,
        "half the batch": batch // 2,
        "cpu_offload on GPUs": 0 if policy.cpu_offload or as_asked.plan.mesh.is_sliced else sharded,
        'recompute="cheap"': max(by_cheap, 0) if policy.recompute == "none" else 0,
    }
    offers = ", ".join(f"{remedy} (about {size(nbytes)} less)" for remedy, nbytes in remedies.items() if nbytes)
    return (
        f"no policy fits into {size(memory_bytes)}: the least that was found takes {size(nbytes)}{step_text}, "
        f"{size(nbytes - memory_bytes)} more, with {_choices_of(least)}; "
        f"the peak as asked for, {size(as_asked.peak)}, has {kinds}; what would help: {offers}"
    )


def _choices_of(least: Candidate) -> str:
    plan = least.timeline.plan
    count, in_flight = len(plan.recomputed), f"{size(plan.sizes.in_flight_bytes)} in flight"
    again = f"{count or 'no'} unit{'s' * (count > 1)} computed again and "
    return f"{again if least.units else ''}{in_flight}"

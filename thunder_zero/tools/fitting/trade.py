"""Prints what each further part of memory saves: a table with bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from thunder_zero.amounts import size

BAR = 16  # columns of the longest bar


@dataclass(frozen=True, slots=True)
class Trade:
    """One choice of the trade between memory and work.

    Attributes:
        peak: bytes at the peak of a step.
        sent: bytes that a rank sends in a step.
        flops: estimated FLOPs of work done again.
        cost: of both, in bytes on the wire.
        kept: number of units that stay gathered, by whatever chose them.
        again: number of units that are computed again whole.
        in_flight_bytes: of the policy.
        chosen: whether it is the answer.
    """

    peak: int
    sent: int
    flops: float
    cost: float
    kept: int
    again: int
    in_flight_bytes: int
    chosen: bool = False


def print_trade(rows: Sequence[Trade], console: Console) -> None:
    """Print the choices, least memory first, with the cost of each over the least; the bars show the difference.
    Of rows with equal figures, one is printed."""
    table = Table(box=None)
    for name in ("peak", "sent", "done again", "units kept", "again", "in flight", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    costs = [row.cost for row in rows]
    least, spread = min(costs, default=0), max(costs, default=0) - min(costs, default=0)
    printed: dict[tuple[str, ...], Trade] = {}
    for row in rows:
        figures = _figures(row, least)
        if row.chosen or figures not in printed:
            printed[figures] = row
    for figures, row in printed.items():
        bar = "█" * max(round(BAR * (row.cost - least) / (spread or 1)), 1)
        table.add_row(*figures, bar + (" <- chosen" if row.chosen else ""))
    console.print(table)


def _figures(row: Trade, least: float) -> tuple[str, ...]:
    """As they are printed; the cost over the least one."""
    flops = f"{row.flops / 1e9:.2f} GFLOP" if row.flops else ""
    counts = str(row.kept), str(row.again), size(row.in_flight_bytes)
    return size(row.peak), size(row.sent), flops, *counts, f"{row.cost / (least or 1):.2f}"

"""Prints a plan of training: a table, the recommendation, code, and what is assumed."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from thunder_zero.amounts import duration, size
from thunder_zero.policy import STAGES
from thunder_zero.tools.planner.figures import Row, TrainingPlan

COLUMNS = ("shards", "recompute", "needs", "fits", "sent", "exposed", "step", "tokens/s", "MFU")


def print_plan(plan: TrainingPlan, console: Console) -> None:
    """Print it."""
    console.print(_heading(plan), highlight=False, soft_wrap=True)
    console.print(_table(plan))
    console.print(f"{plan.reason}.", highlight=False, markup=False)
    if plan.code:
        console.print(f"\n{plan.code}\n", highlight=False, markup=False, soft_wrap=True)
    for sentence in plan.assumed:
        console.print(f"- {sentence}", highlight=False, markup=False)


def _heading(plan: TrainingPlan) -> str:
    traced = max(row.traced_blocks for row in plan.rows)
    repeated = f"; {traced} of {plan.blocks} blocks traced" if traced < plan.blocks else ""
    return (
        f"{plan.model}: {plan.parameters / 1e9:.2f} B parameters on {plan.world_size:,} {plan.device} of "
        f"{size(plan.memory_bytes)}, {plan.devices_per_node} in a node; {plan.tokens:,} tokens of a rank a "
        f"step{repeated}"
    )


def _table(plan: TrainingPlan) -> Table:
    table = Table("stage", box=None)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_cells(row), "<- chosen" if row == plan.chosen else "")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        STAGES[row.stage].name,
        str(row.mesh),
        row.recompute,
        size(row.needed_bytes),
        "yes" if row.fits else "no",
        size(row.sent_bytes),
        duration(row.exposed_seconds),
        duration(row.seconds),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.1%}",
    )

"""Draws which rank holds which rows: of a batch, of parameters, of an optimizer's state.

0.weight    2048 rows  00000000000000000000 11111111111111111111
0.bias      2048 rows  every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from pictures import COLORS, FAINT, INK, title
from rich.console import Console
from rich.text import Text

import thunder_zero as tz

CELLS = 48  # characters that a tensor's rows are drawn with


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rank holds the rows of one tensor.

    Attributes:
        name: name of the tensor.
        count: its number of rows.
        of_rank: (start, stop) of each rank's rows; empty if every rank holds all of them.
    """

    name: str
    count: int
    of_rank: tuple[tuple[int, int], ...] = ()


def rows_of_batch(count: int, world_size: int) -> Rows:
    """Return the rows of a batch that is cut into equal parts; ``count`` is a multiple of ``world_size``."""
    share = count // world_size
    return Rows("batch", count, tuple((rank * share, (rank + 1) * share) for rank in range(world_size)))


def rows_of_plan(plan: tz.schedule.Plan, *, stepped: bool = False) -> list[Rows]:
    """Return the rows of the parameters of a plan at rest; one rank's plan tells them for all ranks.

    With ``stepped``, return the rows that each rank's optimizer steps: in ZeRO-1 every rank has all rows, and steps its
    own.
    """

    def owners(param: tz.schedule.Param) -> tuple[tuple[int, int], ...]:
        rows = map(plan.geometry(param).rows_of, range(plan.mesh.shard.size))
        return tuple((of_rank.start, of_rank.stop) for of_rank in rows)

    return [
        Rows(
            param.path,
            param.shape[0] if param.shape else 1,
            owners(param) if param.sharded and (stepped or not param.resident) else (),
        )
        for param in plan.params
    ]


def print_rows(console: Console, heading: str, tensors: Iterable[Rows]) -> None:
    """Draw tensors in the terminal, a line each; a digit is a rank."""
    console.print(heading, style="bold")
    for tensor in tensors:
        line = Text(f"  {tensor.name:<20}{tensor.count:>6} rows  ")
        for rank, (start, stop) in enumerate(tensor.of_rank):
            cells = round(stop * CELLS / tensor.count) - round(start * CELLS / tensor.count)
            line.append(f"{rank % 10}" * cells, style=COLORS[rank % len(COLORS)])
        console.print(line if tensor.of_rank else line.append("every rank", style=FAINT))


def draw_rows(axes: Axes, heading: str, tensors: Sequence[Rows]) -> None:
    """Draw tensors as bars, in one colour for each rank, grey if every rank holds all."""
    for index, tensor in enumerate(tensors):
        for rank, (start, stop) in enumerate(tensor.of_rank):
            left, width = start / tensor.count, (stop - start) / tensor.count
            axes.barh(index, width, left=left, color=COLORS[rank % len(COLORS)], edgecolor="white", height=0.7)
            if width:
                axes.text(left + width / 2, index, str(rank), ha="center", va="center", color="white", fontsize=9)
        if not tensor.of_rank:
            axes.barh(index, 1, color=FAINT, alpha=0.5, height=0.7)
            axes.text(0.5, index, "every rank", ha="center", va="center", color=INK, fontsize=9)
    axes.set_yticks(range(len(tensors)), [tensor.name for tensor in tensors], fontsize=9)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    title(axes, heading)

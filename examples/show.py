"""Shows a run on the terminal: a progress bar with loss and throughput, a table of figures, tensors' bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from ranks import Ranks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

WIDTH = 100  # columns, if the output is not a terminal
LAST_STEPS = 20  # that the throughput is the median of


def console_of(ranks: Ranks) -> Console:
    """Return the console of rank 0; other ranks print nothing."""
    return Console(quiet=ranks.rank != 0, width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def figures(console: Console, title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> None:
    """Print a table: names at the left, figures right-aligned.

    Args:
        console: rank 0's.
        title: above the table.
        rows: the cells of each line, the name first.
        header: names of the columns; none by default.
    """
    rows = [tuple(row) for row in rows]
    columns = header or [""] * max(map(len, rows))
    table = Table(title=title, title_justify="left", title_style="bold", show_header=bool(header))
    for at, name in enumerate(columns):
        table.add_column(name, justify="right" if at == 1 or (header and at) else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def mb(nbytes: float) -> str:
    """Return text such as "12.34 MB"."""
    return f"{nbytes / 1e6:.2f} MB"


@dataclass
class Bar:
    """The progress bar of one training run.

    Attributes:
        items: rows or tokens in a step, over all ranks.
        seconds: of each step so far.
    """

    progress: Progress
    task: TaskID
    items: int
    seconds: list[float] = field(default_factory=list)

    def step(self, loss: float) -> None:
        """Count one more step, with this loss."""
        now = perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        speed = f"{self.speed:,.0f}"
        self.progress.update(self.task, advance=1, loss=f"{loss:.4f}", speed=speed)

    def note(self, text: str) -> None:
        """Show a few words at the end of the line from now on."""
        self.progress.update(self.task, note=f", {text}")

    @property
    def speed(self) -> float:
        """Return the items a second in a median step of the last ones."""
        return self.items / median(self.seconds[1:][-LAST_STEPS:] or self.seconds)

    def __post_init__(self) -> None:
        self._last = perf_counter()


@contextmanager
def progress_bar(console: Console, name: str, steps: int, items: int, unit: str, done: int = 0) -> Iterator[Bar]:
    """Yield a bar called ``name`` over training steps of ``items`` rows or tokens (``unit``) each, of which some are
    done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}, {task.fields[speed]} " + unit + "/s{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        task = progress.add_task(name, total=steps, completed=done, loss="-", speed="-", note="")
        yield Bar(progress, task, items)

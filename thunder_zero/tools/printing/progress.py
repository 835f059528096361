"""Shows progress on stderr, as a bar or as lines with the current work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.table import Column

FIXED = Column(no_wrap=True)
WORK = "{task.description}"


def _bars(*columns: progress.ProgressColumn, expand: bool = False) -> progress.Progress:
    """Return bars with these columns, which are shown only if stderr is a terminal."""
    console = Console(stderr=True)
    return progress.Progress(*columns, console=console, transient=True, expand=expand, disable=not console.is_terminal)


@contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar if stderr is a terminal. Yield a function to call with the bytes done since its last call."""
    shares = progress.BarColumn(), progress.TaskProgressColumn(), progress.DownloadColumn()
    with _bars(progress.TextColumn(WORK), *shares) as bars:
        task = bars.add_task(what, total=total_bytes)
        yield lambda count: bars.advance(task, count)


@contextmanager
def show_status(what: str) -> Iterator[Callable[[str], None]]:
    """Show one line if stderr is a terminal. Yield a function that takes a description of the current work."""
    with _bars(progress.SpinnerColumn(), progress.TextColumn(WORK)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda now: bars.update(task, description=f"{what} {now}")


@contextmanager
def show_steps(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar if stderr is a terminal, or else lines. Yield ``show(now, ended)``.

    It shows the current work, if any, and counts further steps that have ended.
    """
    count, elapsed = progress.MofNCompleteColumn(table_column=FIXED), progress.TimeElapsedColumn(FIXED)
    work = progress.TextColumn(WORK, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    with _bars(progress.SpinnerColumn(), progress.BarColumn(bar_width=10), count, elapsed, work, expand=True) as bars:
        task = bars.add_task(what, total=total)

        def show(now: str = "", ended: int = 0) -> None:
            bars.update(task, description=now or None, advance=ended)
            if now and bars.disable:
                print(f"{what} {bars.tasks[0].completed:.0f}/{total} {now}", file=sys.stderr, flush=True)

        yield show

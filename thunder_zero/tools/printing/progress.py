"""Shows progress on stderr, as a bar or as lines with the current work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column

FIXED = Column(no_wrap=True)
TEXT = Column(ratio=1, no_wrap=True, overflow="ellipsis")


def _bars(*columns: ProgressColumn, expand: bool = False) -> Progress:
    """Return bars with these columns, which are shown only if stderr is a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, expand=expand, disable=not console.is_terminal)


@contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar if stderr is a terminal. Yield a function to call with the bytes done since its last call."""
    with _bars(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn()) as bars:
        task = bars.add_task(what, total=total_bytes)
        yield lambda count: bars.advance(task, count)


@contextmanager
def show_status(what: str) -> Iterator[Callable[[str], None]]:
    """Show one line if stderr is a terminal. Yield a function that takes a description of the current work."""
    with _bars(SpinnerColumn(), TextColumn("{task.description}")) as bars:
        task = bars.add_task(what, total=None)
        yield lambda now: bars.update(task, description=f"{what} {now}")


@contextmanager
def show_steps(what: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a bar if stderr is a terminal, or else lines. Yield ``show(now, ended)``.

    It shows the current work, if any, and counts further steps that have ended.
    """
    fixed = SpinnerColumn(), BarColumn(bar_width=10), MofNCompleteColumn(table_column=FIXED), TimeElapsedColumn(FIXED)
    with _bars(*fixed, TextColumn("{task.description}", table_column=TEXT), expand=True) as bars:
        task = bars.add_task(what, total=total)

        def show(now: str = "", ended: int = 0) -> None:
            bars.update(task, description=now or None, advance=ended)
            if now and bars.disable:
                print(f"{what} {bars.tasks[0].completed:.0f}/{total} {now}", file=sys.stderr, flush=True)

        yield show

"""Shows progress on stderr, as a bar or as lines with the current work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column


@contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar if stderr is a terminal. Yield a function to call with the bytes done since its last call."""
    console = Console(stderr=True)
    if not console.is_terminal:  # rich would print an empty line
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(what, total=total_bytes)
        yield lambda count: bars.advance(task, count)


@contextmanager
def show_status(what: str) -> Iterator[Callable[[str], None]]:
    """Show one line if stderr is a terminal. Yield a function that takes a description of the current work."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: None
        return
    with console.status(what) as status:
        yield lambda now: status.update(f"{what} {now}")


@dataclass
class Steps:
    """The progress of long work: the current work, and the number of finished steps."""

    show: Callable[[str, int], None]
    done: int = 0

    def tell(self, now: str) -> None:
        """Show the current work."""
        self.show(now, self.done)

    def advance(self) -> None:
        """Count a finished step."""
        self.done += 1


@contextmanager
def show_steps(what: str, total: int) -> Iterator[Steps]:
    """Show a bar if stderr is a terminal. Otherwise print a line for each call of ``tell``."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Steps(lambda now, done: print(f"{what} {done}/{total} {now}", file=sys.stderr, flush=True))
        return
    text = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    fixed = (SpinnerColumn(), BarColumn(bar_width=10), MofNCompleteColumn(table_column=Column(no_wrap=True)))
    elapsed = TimeElapsedColumn(table_column=Column(no_wrap=True))
    with Progress(*fixed, elapsed, text, console=console, transient=True, expand=True) as bars:
        task = bars.add_task(what, total=total)
        yield Steps(lambda now, done: bars.update(task, description=now, completed=done))

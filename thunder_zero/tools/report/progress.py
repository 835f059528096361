"""Progress on stderr: a bar, or a line that says what is done now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn


@contextmanager
def show_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar if stderr is a terminal; yields a function: call it with the bytes done since the last call."""
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
    """Show one line if stderr is a terminal; yields a function: call it with what is done now."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda now: None
        return
    with console.status(what) as status:
        yield lambda now: status.update(f"{what} {now}")

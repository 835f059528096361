"""Prints the rows of a trace as a table of columns, highlighted on a terminal.

::

    # forward, ZeRO-3, rank 0 of 4               does    parameters        sent gathered    alive
    ft1 = zero_all_gather(t_w, 'h.0.w')          gather  h.0.w         1.50 KiB 2.00 KiB 12.0 KiB

The column "alive" exists only if the lines have a forecast of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from thunder_zero.plan.amounts import size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import Plan
from thunder_zero.tools.printing.words import WIDTH, clip, fill, fold, place_of
from thunder_zero.tools.table.rows import Row, label_of

NARROWEST, WIDEST = 80, 140
KIND, PARAMETERS, BYTES = 7, 25, 8  # columns
QUIET = "dim"
Widths = tuple[int, int, bool]  # of the code, of the parameters; whether there are bytes alive
STYLES: dict[str, str] = {
    "gather": "cyan",
    "wait": "blue",
    "compute": "",
    "return": "",
    "free": "green",
    "reduce": "magenta",
    "defer": "magenta",
    "encode": "yellow",
    "decode": "yellow",
    TENSOR: "magenta",
    "": QUIET,
}


def print_rows(rows: Sequence[Row | int], plan: Plan, phase: str, console: Console) -> None:
    """Print a table of a phase's rows and gaps. Code is folded to the width of its column."""
    width = min(max(console.width, NARROWEST), WIDEST) if console.is_terminal else WIDTH
    columns = _widths(rows, width)
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    _print_title(plan, phase, columns, console)
    if not rows:
        write(console, "# this phase does not use this unit", QUIET)
    origin, gathered = "", 0
    for row in rows:
        if isinstance(row, int):
            write(console, f"# ... {row} lines", QUIET)
            continue
        if row.origin not in ("", origin):
            origin = row.origin
            write(console, clip(f"# {origin}", width), f"{QUIET} italic")
        for text in _lines(row, plan, syntax, columns, width, changed=row.gathered != gathered):
            write(console, text)
        if row.is_peak:
            write(console, f"# the peak of the step: {size(row.highest or 0)} alive in the line above", "bold red")
        gathered = row.gathered
    console.print()


def _widths(rows: Sequence[Row | int], width: int) -> Widths:
    """Return the widths of the columns of code and of parameters, and whether there is a column of bytes alive."""
    has_alive = any(isinstance(row, Row) and row.alive is not None for row in rows)
    parameters, columns_of_bytes = PARAMETERS - has_alive, 2 + has_alive
    return width - KIND - parameters - columns_of_bytes * BYTES - 4 - has_alive, parameters, has_alive


def _print_title(plan: Plan, phase: str, columns: Widths, console: Console) -> None:
    """Print the title of a phase and the heads of the columns. A long title gets its own line."""
    code_width, params_width, has_alive = columns
    title = Text(f"# {phase}, {place_of(plan)}", "bold")
    if len(title) > code_width:
        write(console, title)
        title = Text("#", "bold")
    title.pad_right(code_width - len(title))
    title.append(f" {'does':{KIND}} {'parameters':{params_width}} {'sent':>{BYTES}} {'gathered':>{BYTES}}")
    title.append(f" {'alive':>{BYTES}}" if has_alive else "")
    write(console, title)


def print_total(rows: Sequence[Row | int], console: Console) -> None:
    """Print the number of collectives, the bytes that this rank sends, and the most gathered bytes.

    Collectives of tensor parallelism and deferred gradients each get a further line.
    """
    shown = [row for row in rows if isinstance(row, Row)]
    gathers, reduces = (sum(row.kind == kind for row in shown) for kind in ("gather", "reduce"))
    sent, slices = sum(row.sent or 0 for row in shown), [row.sent for row in shown if row.kind == TENSOR and row.sent]
    count, peak = gathers + reduces, max((row.gathered for row in shown), default=0)
    collectives = f"{count} collective{'s' * (count != 1)} ({gathers} gather, {reduces} reduce)"
    write(console, f"{collectives}, {sent:,} B sent by this rank, {peak:,} B gathered at most", "bold")
    if slices:
        of_slices = f"and {len(slices)} of torch's tensor parallelism, which send {sum(slices):,} of these bytes"
        write(console, of_slices, "bold")
    if deferred := sum(row.deferred for row in shown):
        write(console, f"{deferred:,} B of full gradients are held for a later backward", "bold")


def _lines(row: Row, plan: Plan, syntax: Syntax, columns: Widths, whole: int, *, changed: bool) -> Iterator[Text]:
    """Yield the lines of a row. Code is on the left and its meaning on the right, both possibly on several lines.

    Below the last line of the meaning, code has the width ``whole``. If nothing is sent, parameters also fill the
    column of bytes sent.
    """
    sent = "" if row.sent is None else f" {size(row.sent):>{BYTES}}"
    code_width, width = columns[0], columns[1] + 1 + BYTES - len(sent)
    words = re.split(r"(?<= )", label_of(row, plan))
    parts = [part for word in words for part in (re.split(r"(?<=\.)", word) if len(word) > width else [word])]
    labels = fill(parts, [width])
    folded = fold(row.code, [code_width] * len(labels) + [whole])
    code = syntax.highlight("\n".join(folded)).split("\n", allow_blank=True)
    style = STYLES.get(row.kind, "") if row.params else QUIET
    for index, (left, params) in enumerate(zip_longest(code[: len(folded)], labels)):
        first = index == 0
        text = left.copy() if left else Text()
        if params or first:
            text.pad_right(code_width - len(text))
            text.append(f" {row.kind if first else '':{KIND}} {params:{width}}", style)
        if first:
            text.append(sent, "yellow")
            text.append(f" {size(row.gathered):>{BYTES}}", "bold" if changed else QUIET)
            text.append("" if row.alive is None else f" {size(row.alive):>{BYTES}}", QUIET)
        yield text


def write(console: Console, words: str | Text, style: str = "") -> None:
    """Print words as they are. Spaces at the end of a styled text are left out."""
    if isinstance(words, Text):
        words.rstrip()
    console.print(words, style=style, soft_wrap=True, highlight=False, markup=False)

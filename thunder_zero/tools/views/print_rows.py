"""Selects rows of a trace, and prints them as a table of columns; formats timelines as text.

::

    # forward, ZeRO-3, rank 0 of 4               does    parameters        sent gathered    alive
    ft1 = zero_all_gather(t_w, 'h.0.w')          gather  h.0.w         1.50 KiB 2.00 KiB 12.0 KiB

The column "alive" exists only if the lines have a forecast of memory. Without Thunder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

from thunder_zero.plan.amounts import WIDTH, size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.outer import SITE
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.ops import Free
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.printing.words import clip, fill, fold, place_of
from thunder_zero.tools.table.rows import COMPUTES, ONLY, Row, row_label, totals

NARROWEST, WIDEST = 80, 140
KIND, PARAMETERS, BYTES = 7, 25, 8  # columns
QUIET = "dim"
Widths = tuple[int, int, bool]  # of the code, of the parameters; whether there are bytes alive
STYLES: dict[str, str] = {
    "gather": "cyan",
    "wait": "blue",
    "free": "green",
    "reduce": "magenta",
    "defer": "magenta",
    "encode": "yellow",
    "decode": "yellow",
    TENSOR: "magenta",
    SITE: "magenta",
    "": QUIET,
}
BORDER = "-- backward --"
VALUES_WIDTH = 32  # a fixed width, so that two timelines can be compared line by line


def print_rows(rows: Sequence[Row | int], plan: Plan, phase: str, console: Console) -> None:
    """Print a table of a phase's rows and gaps. Code is folded to the width of its column."""
    width = min(max(console.width, NARROWEST), WIDEST) if console.is_terminal else WIDTH
    has_alive = any(isinstance(row, Row) and row.alive is not None for row in rows)
    parameters = PARAMETERS - has_alive
    columns = width - KIND - parameters - (2 + has_alive) * (BYTES + 1) - 2, parameters, has_alive
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    _print_title(plan, phase, columns, console)
    if not rows:
        write(console, "# this phase does not use this unit", QUIET)
    origin, unsharded = "", 0
    for row in rows:
        if isinstance(row, int):
            write(console, f"# ... {row} lines", QUIET)
            continue
        if row.origin not in ("", origin):
            origin = row.origin
            write(console, clip(f"# {origin}", width), f"{QUIET} italic")
        for code in row.code.splitlines() if row.position < 0 else ():
            if code.startswith("#"):
                write(console, clip(code, width), QUIET)
        for text in _lines(row, plan, syntax, columns, width, changed=row.unsharded != unsharded):
            write(console, text)
        if row.types:
            write(console, f"    # {row.types}", QUIET)
        if row.is_peak:
            write(console, f"# the peak of the step: {size(row.highest or 0)} alive in the line above", "bold red")
        unsharded = row.unsharded
    console.print()


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
    """Print the number of collectives, the bytes that this rank sends, and the most gathered bytes."""
    shown = [row for row in rows if isinstance(row, Row)]
    sums, peak = totals(shown), max((row.unsharded for row in shown), default=0)
    count = sums["gathers"] + sums["reduces"]
    collectives = f"{count} collective{'s' * (count != 1)} ({sums['gathers']} gather, {sums['reduces']} reduce)"
    write(console, f"{collectives}, {sums['sent']:,} B sent by this rank, {peak:,} B gathered at most", "bold")
    if nbytes := sums["sent by slices"]:
        of_slices = f"and {sums['slices']} of torch's tensor parallelism, which send {nbytes:,} of these bytes"
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
    words = re.split(r"(?<= )", row_label(row, plan))
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
            text.append(f" {size(row.unsharded):>{BYTES}}", "bold" if changed else QUIET)
            text.append("" if row.alive is None else f" {size(row.alive):>{BYTES}}", QUIET)
        yield text


def write(console: Console, words: str | Text, style: str = "") -> None:
    """Print words as they are. Spaces at the end of a styled text are left out."""
    if isinstance(words, Text):
        words.rstrip()
    console.print(words, style=style, soft_wrap=True, highlight=False, markup=False)


def select(rows: Sequence[Row], plan: Plan, unit: str | None, only: str | None) -> tuple[Row | int, ...]:
    """Return the rows of a unit that ``ONLY[only]`` selects. The default is all units and all lines.

    A unit's rows extend from the first to the last row that waits for its parameters or computes with them. The unit's
    collectives and frees outside this range are included. A number stands for that many omitted rows.
    """
    if unit is not None and unit not in plan.units:
        raise ValueError(f"unit is {unit!r}; the units of this module are {', '.join(map(repr, plan.units))}")
    if only is not None and only not in ONLY:
        raise ValueError(f"only is {only!r}; choose {' or '.join(map(repr, ONLY))}, or None for all lines")
    candidates = range(len(rows)) if unit is None else _of_unit(rows, plan, unit)
    chosen = [index for index in candidates if only is None or ONLY[only](rows[index])]
    shown: list[Row | int] = list(rows[chosen[0] : chosen[0] + 1]) if chosen else []
    for previous, index in pairwise(chosen):
        between = rows[previous + 1 : index]
        gap = between if len(between) < 2 else [len(between)]  # a gap of one line would save nothing
        shown += [*gap, rows[index]]
    return tuple(shown)


def _of_unit(rows: Sequence[Row], plan: Plan, unit: str) -> list[int]:
    paths = {param.path for param in plan.params if param.unit == unit}
    touching = [index for index, row in enumerate(rows) if not paths.isdisjoint(row.params)]
    waits = [index for index in touching if rows[index].kind == "wait" and not rows[index].gradients]
    using = sorted([*waits, *(index for index in touching if rows[index].kind in COMPUTES)])
    return sorted({*touching, *(range(using[0], using[-1]) if using else ())})


def format_timeline(timeline: Timeline, *, numbered: bool = False) -> str:
    """Return a line for each operation, in order, with its kind, writes, reads and parameters.

    FREEs of other values than gathered parameters are left out. Lines of recomputed operations end with "again". A
    border separates the phases. Lines may be long. A numbered line begins with "op 22", as errors name it::

        gather   fut0 <- t_w                           h.0.w
        wait     w <- fut0                             h.0.w
    """
    lines: list[str] = []
    for index, op in enumerate(timeline.ops):
        if index == timeline.backward_start:
            lines.append(BORDER)
        if isinstance(op, Free) and not op.params:
            continue
        reads, number, again = ", ".join(op.reads), f"op {index:<4} " * numbered, "  again" * op.repeated
        values = reads if isinstance(op, Free) else f"{', '.join(op.writes)} <- {reads}".strip()
        lines.append(f"{number}{op.kind:<8} {values:<{VALUES_WIDTH}}  {', '.join(op.params)}{again}".rstrip())
    return "\n".join(lines)

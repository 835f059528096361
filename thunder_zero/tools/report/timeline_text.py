"""Prints a timeline as plain text, one operation a line.

::

    gather   fut0 <- t_w                      h.0.w
    wait     w <- fut0                        h.0.w
    compute  y <- x, w
    free     w                                h.0.w
    -- backward --
    gather   fut0_again <- t_w                h.0.w  again
"""

from __future__ import annotations

from thunder_zero.schedule.timeline import Kind, Op, Timeline

BORDER = "-- backward --"
VALUES_WIDTH = 32  # fixed, so that the texts of two timelines can be compared line by line


def format_timeline(timeline: Timeline) -> str:
    """The operations in order: kind, writes and reads, parameters, and "again" for a copy.

    Long names make long lines. A border separates the halves.
    """
    lines = [_line(op) for op in timeline.ops]
    border = next((at for at, op in enumerate(timeline.ops) if op.backward), None)
    if border is not None:
        lines.insert(border, BORDER)
    return "\n".join(lines)


def _line(op: Op) -> str:
    reads = ", ".join(op.reads)
    values = reads if op.kind is Kind.FREE else f"{', '.join(op.writes)} <- {reads}".strip()
    return f"{op.kind:<8} {values:<{VALUES_WIDTH}}  {', '.join(op.params)}{'  again' if op.repeated else ''}".rstrip()

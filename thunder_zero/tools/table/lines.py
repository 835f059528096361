"""Reads the lines of a program's traces as rows, with a row for each phase without a trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from thunder_zero.plan.outer import SITE
from thunder_zero.tools.table.rows import COMPUTES, DIGESTS, LOSS, OPTIMIZER_STEP, OUTER_STEP, Row, explained
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import operator_of

import thunder
from thunder.core.codeutils import get_source_line
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import tracectx

THUNDER = Path(thunder.__file__).parent
AROUND = {
    DIGESTS: "# digests of this rank's rows, by which ranks know what to refresh",
    LOSS: "# the loss and its gradient",
    OPTIMIZER_STEP: "optimizer.step()",
}
ORDER = (DIGESTS, "forward", LOSS, "backward", OPTIMIZER_STEP, OUTER_STEP)


def traced_rows(traces: Traces) -> Iterator[Row]:
    """Yield the lines of forward and backward, except lines that are only comments, which name the inputs.

    Then yield a line for each fragment of the outer step, if there is one.
    """
    unit = ""
    for phase in ("forward", "backward"):
        lines, backward = _lines(traces, phase), phase == "backward"
        for row in explained(lines, traces.timeline, traces.lines, backward=backward, unit=unit):
            unit = row.unit if row.kind in COMPUTES else unit
            yield row
    if (outer := traces.exchanges) is None:
        return
    for fragment, vectors in enumerate(outer.vectors_of(traces.plan)):
        yield Row(
            OUTER_STEP,
            -1,
            "".join(f"# {text}\n" for text in (outer.turn(traces.plan, fragment), outer.rounding) if text)
            + "outer.step()",
            kind=SITE,
            params=tuple(path for vector in vectors for path in vector.paths),
            form=str(outer.wire) if outer.wire.block else "",
            over=SITE,
            sent=outer.sent(vectors, outer.sites),
        )


def in_order(rows: Iterable[Row], around: Mapping[str, str]) -> list[Row]:
    """Return rows with a row for each phase without a trace, whose code is a value of ``around``."""
    added = (Row(phase, -1, code) for phase, code in around.items())
    ordered, unsharded = sorted((*rows, *added), key=lambda row: ORDER.index(row.phase)), 0
    for index, row in enumerate(ordered):
        if row.position < 0:
            ordered[index] = replace(row, unsharded=unsharded)  # what is gathered stays so around a trace
        unsharded = ordered[index].unsharded
    return ordered


def _lines(traces: Traces, phase: str) -> Iterator[Row]:
    trace = traces.forward if phase == "forward" else traces.backward
    if trace is None:
        return
    with tracectx(trace):
        for position, bsym in enumerate(trace.bound_symbols):
            code = "\n".join(bsym.python(indent=0, print_depth=1))
            if any(not line.startswith("#") for line in code.splitlines()):
                yield Row(phase, position, code, _origin(bsym, phase))


def _origin(bsym: BoundSymbol, phase: str) -> str:
    """Return the user's line, such as ``gpt.py:98  x = self.embedding(tokens)``; "" if there is none."""
    name, positions = bsym.source_filename, bsym.source_positions
    if name is None or positions is None or positions.lineno is None or Path(name).is_relative_to(THUNDER):
        return ""
    if phase == "backward" and operator_of(bsym) is None:  # a recorded position would be of a line of forward
        return ""
    prefix = "gradient of " if phase == "backward" else ""
    return f"{prefix}{Path(name).name}:{positions.lineno}  {get_source_line(name, positions.lineno).strip()}"

"""One program of a page: what the page shows beside the rows of the table. Frozen data.

The page numbers the rows of the table from 0: these numbers are its lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from thunder_zero.plan.amounts import duration
from thunder_zero.schedule.ops import Compute, Reduce, starts_collective
from thunder_zero.tools.cost.costs import Lane
from thunder_zero.tools.cost.estimate import Estimate
from thunder_zero.tools.table.rows import COMPUTES, Row, label
from thunder_zero.tools.table.table import Table
from thunder_zero.tools.views.explain import Explanation, explanation_of
from thunder_zero.tools.views.reasons import why_launch

Data = dict[str, Any]


@dataclass(frozen=True)
class PageProgram:
    """A program with its forecasts."""

    name: str  # a name such as "ZeRO-3" or "measured times"
    table: Table
    estimate: Estimate  # the times of the table
    no_memory: str = ""  # the reason why there is no forecast of memory; "" with a forecast
    note: str = ""  # the origin of measured times; "" for a forecast

    @cached_property
    def bars(self) -> tuple[Data, ...]:
        """The bars of all lanes, with the line of their row. Adjacent spans of one line become one bar."""
        bars: list[Data] = []
        for line, span in self.table.spans:
            kind = self.estimate.timeline.ops[span.op].kind
            lane = str(span.lane) if span.lane in (Lane.COMPUTE, Lane.TENSOR) else f"{kind} {span.lane}"
            bar = {"lane": lane, "line": line, "start": span.start, "end": span.end, "waits": span.waits}
            if bars and bar | {"start": bars[-1]["end"]} == bars[-1] | {"start": span.start, "end": span.end}:
                bars[-1]["end"] = span.end
            elif span.end > span.start:
                bars.append(bar)
        return tuple(bars)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in use, in order: compute, tensor parallelism, and each kind of launch on each wire."""
        used = {bar["lane"] for bar in self.bars}
        launches = (
            f"{kind} {lane}" for kind in ("gather", "reduce") for lane in (Lane.SHARD, Lane.REPLICATE, Lane.TENSOR)
        )
        return (str(Lane.COMPUTE), *(lane for lane in (str(Lane.TENSOR), *launches) if lane in used))

    @cached_property
    def units(self) -> tuple[tuple[str, int, int], ...]:
        """(unit, first line, last line) tuples of successive lines that compute with one unit."""
        rows = self.table.all
        computing = (index for index, row in enumerate(rows) if row.kind in COMPUTES and _seconds(row))
        runs = groupby(computing, key=lambda index: (rows[index].unit, rows[index].phase))
        return tuple((unit, (indices := list(run))[0], indices[-1]) for (unit, _), run in runs)

    @cached_property
    def explanations(self) -> dict[str, Explanation]:
        """A mapping from parameter paths to explanations, with this program's times."""
        return {param.path: explanation_of(self.table, param) for param in self.table.traces.plan.params}

    @cached_property
    def collectives(self) -> tuple[Data, ...]:
        """All collectives, in the order of their launches: each launch with its wait."""
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[Data]:
        table = self.table
        timeline, rows = table.traces.timeline, table.all
        ending = {(row.lane, row.wire_end): row for row in rows if row.wire_seconds}
        for index, op in enumerate(timeline.ops):
            if not starts_collective(op):
                continue
            exchange = op.exchange if isinstance(op, Compute) else None
            launch, wait = table.place[index], table.place[table.ends[op.writes[0]]]
            row, launched, waited = rows[launch], rows[launch].end or 0.0, rows[wait].start or 0.0
            earlier_row = ending.get((row.lane, row.wire_start))
            earlier = label(earlier_row.params, timeline.plan, gradients=earlier_row.gradients) if earlier_row else ""
            names = label(op.params, timeline.plan, gradients=isinstance(op, Reduce))
            exposed = row.exposed + rows[wait].exposed  # without overlap compute waits at the launch
            queued = max((row.wire_start or 0.0) - launched, 0.0)
            yield {
                "op": index,
                "kind": row.kind,
                "backward": op.backward,
                "unit": row.unit,
                "params": len(op.params),
                "label": f"{exchange.moves} of {op.reads[0]}" if exchange else names,
                "sent_bytes": row.sent,
                "launch": launch,
                "wait": wait,
                "launched": launched,
                "waited": waited,
                "wire_seconds": row.wire_seconds,
                "exposed_seconds": exposed,
                "why": why_launch(table, op),
                "why_exposed": _why_exposed(row.wire_seconds, exposed, max(waited - launched, 0.0), queued, earlier),
                "hidden_share": max(0.0, 1 - exposed / row.wire_seconds) if row.wire_seconds else 1.0,
            }


def _seconds(row: Row) -> float:
    return (row.end or 0.0) - (row.start or 0.0)


def _why_exposed(wire: float, exposed: float, ahead: float, queued: float, earlier: str) -> str:
    """Return the reason why compute waits for a collective; "" if compute does not wait.

    Seconds: ``wire`` on the wires, ``exposed`` of waiting, ``ahead`` of compute between launch and wait, ``queued``
    behind the ``earlier`` collective on the wire.
    """
    if not exposed:
        return ""
    cause = f"only {duration(ahead)} lie between launch and wait" if ahead else "its wait follows at once"
    queue_text = f", and for {duration(queued)} the wire still carries {earlier or 'others'}" if queued else ""
    return f"it takes {duration(wire)} on the wire; {cause}{queue_text}"

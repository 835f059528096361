"""Describes one program of a page: lines with their times, bars, collectives. Frozen data.

In: traces, a forecast of time and a forecast of memory. A line of the page is a line of a trace, or a whole
phase without a trace: the digests of ZeRO-1, the loss, the optimizer's step::

    digests | forward line 0, 1, .. | loss | backward line 0, 1, .. | optimizer step

The page numbers its lines from 0. Positions of operations are positions in ``Traces.timeline``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from thunder_zero.plan.mesh import TENSOR
from thunder_zero.schedule.ops import Compute, Reduce, ends_collective, starts_collective
from thunder_zero.tools.ask.explain import explain_all
from thunder_zero.tools.ask.explanation import Explanation
from thunder_zero.tools.ask.print_trace import rows_of
from thunder_zero.tools.cost.costs import Lane
from thunder_zero.tools.cost.estimate import Estimate
from thunder_zero.tools.cost.lanes import Span
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Memory
from thunder_zero.tools.page.collectives import Bar, Collective, why_exposed, why_there
from thunder_zero.tools.printing.line_meanings import Row, label
from thunder_zero.tools.printing.text import short
from thunder_zero.traces.compiled import Traces

DIGESTS, LOSS = "digests", "loss"  # phases without a trace, beside OPTIMIZER_STEP
AROUND = {
    DIGESTS: "# digests of this rank's rows, by which ranks know what to refresh",
    LOSS: "# the loss and its gradient",
    OPTIMIZER_STEP: "optimizer.step()",
}


@dataclass(frozen=True, slots=True)
class PageLine:
    """A line of the page."""

    phase: str  # "digests", "forward", "loss", "backward" or "optimizer step"
    code: str  # its Python statement
    row: Row | None  # the meaning of the line; None outside a trace
    unit: str  # the unit of the line's parameters, or else the unit of the surrounding lines
    ops: tuple[int, ...]  # positions of the line's operations in ``Traces.timeline``
    # start, end: the times of the line on the compute lane, in seconds since the step began
    start: float
    end: float
    # the position in ``Memory.lines`` of this line, or else of the last line before it. None before the first.
    memory: int | None


@dataclass(frozen=True)
class PageProgram:
    """A program with its forecasts."""

    name: str  # a name such as "ZeRO-3" or "measured times"
    traces: Traces  # the program
    estimate: Estimate  # the program's time, forecast or measured
    memory: Memory | None  # the program's forecast of memory, if any
    no_memory: str = ""  # the reason why there is no forecast of memory; "" with a forecast
    note: str = ""  # the origin of measured times; "" for a forecast

    @cached_property
    def lines(self) -> tuple[PageLine, ...]:
        """All lines of the page, in the order in which they run."""
        return tuple(self._lines())

    def _lines(self) -> Iterator[PageLine]:
        spans: dict[int | str, list[Span]] = {}
        for span in self.estimate.spans:
            if span.lane is Lane.COMPUTE and span.seconds:
                spans.setdefault(self._places[span.op], []).append(span)
        ops: dict[tuple[str, int], list[int]] = {}
        for index, (op, positions) in enumerate(zip(self.traces.timeline.ops, self.traces.lines, strict=True)):
            ops.setdefault(("backward" if op.backward else "forward", positions[0]), []).append(index)
        memory_lines = enumerate(self.memory.lines if self.memory else ())
        ran = {(line.phase, line.position): index for index, line in memory_lines}
        now, unit, memory = 0.0, "", None
        for phase, row in self._rows():
            position = row.line.position if row else -1
            line_ops = tuple(ops.get((phase, position), ()))
            line_spans = [span for place in line_ops or (phase,) for span in spans.get(place, ())]
            start = min([span.start for span in line_spans], default=now)
            end = max([span.end for span in line_spans], default=now)
            memory, now = ran.get((phase, position), memory), max(now, end)
            line_unit = self.traces.plan.by_name[row.params[0]].unit if row and row.params else unit
            unit = line_unit if row and row.kind == "compute" else unit
            code = short(row.line.code) if row else AROUND[phase]
            yield PageLine(phase, code, row, line_unit if row else "", line_ops, start, now, memory)

    def _rows(self) -> Iterator[tuple[str, Row | None]]:
        """Yield the phase of each line, and its row if it is a line of a trace."""
        extra_phases = {place for place in self._places if isinstance(place, str)}
        extra_phases |= {line.phase for line in self.memory.lines if line.position < 0} if self.memory else set()
        for phase in (DIGESTS, "forward", LOSS, "backward", OPTIMIZER_STEP):
            if phase in AROUND:
                yield from [(phase, None)] if phase in extra_phases else []
            else:
                yield from ((phase, row) for row in rows_of(self.traces, phase, self.memory))

    @cached_property
    def _places(self) -> tuple[int | str, ...]:
        """Each estimated operation's position in ``Traces.timeline``, or its phase outside the traces."""
        ops, index = self.traces.timeline.ops, 0
        places: list[int | str] = []
        for op in self.estimate.timeline.ops:
            if index < len(ops) and op is ops[index]:
                places.append(index)
                index += 1
            else:
                places.append(DIGESTS if index == 0 else LOSS if index < len(ops) - 1 else OPTIMIZER_STEP)
        return tuple(places)

    @cached_property
    def line_of(self) -> dict[int | str, int]:
        """A mapping from operations to positions of lines on the page. Other keys are phases without a trace."""
        index_of: dict[int | str, int] = {}
        for index, line in enumerate(self.lines):
            index_of.update(dict.fromkeys(line.ops or (line.phase,), index))
        return index_of

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all lanes. Adjacent spans of one line become one bar."""
        bars: list[Bar] = []
        for span in self.estimate.spans:
            op, line = self.estimate.timeline.ops[span.op], self.line_of[self._places[span.op]]
            is_named = span.lane in (Lane.COMPUTE, Lane.TENSOR)
            lane = str(span.lane) if is_named else f"{op.kind} {span.lane}"
            bar = Bar(lane, line, span.start, span.end, span.waits)
            last = bars[-1] if bars else bar
            if (last.lane, last.line, last.end, last.waits) == (lane, line, bar.start, bar.waits) and last is not bar:
                bars[-1] = Bar(lane, line, last.start, bar.end, bar.waits)
            elif span.end > span.start:
                bars.append(bar)
        return tuple(bars)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """The lanes in use, in order: compute, tensor parallelism, and each kind of launch on each wire."""
        used = {bar.lane for bar in self.bars}
        launches = (
            f"{kind} {lane}" for kind in ("gather", "reduce") for lane in (Lane.SHARD, Lane.REPLICATE, Lane.TENSOR)
        )
        return (str(Lane.COMPUTE), *(lane for lane in (str(Lane.TENSOR), *launches) if lane in used))

    @cached_property
    def units(self) -> tuple[tuple[str, int, int], ...]:
        """(unit, first line, last line) tuples of successive lines that compute with one unit."""
        runs = groupby(self._computing(), key=lambda index: (self.lines[index].unit, self.lines[index].phase))
        return tuple((unit, (indices := list(run))[0], indices[-1]) for (unit, _), run in runs)

    def _computing(self) -> Iterator[int]:
        for number, line in enumerate(self.lines):
            if line.row is not None and line.row.kind == "compute" and line.end > line.start:
                yield number

    @cached_property
    def explanations(self) -> dict[str, Explanation]:
        """A mapping from parameter paths to explanations, with this program's times."""
        places = ((span, self._places[span.op]) for span in self.estimate.spans)
        spans = [
            Span(place, span.lane, span.start, span.end, None, span.waits)
            for span, place in places
            if isinstance(place, int)
        ]
        return explain_all(self.traces, spans, self.estimate.device.name)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives, in the order of their launches."""
        timeline, rings, waits = self.traces.timeline, dict[int, list[Bar]](), dict[int, list[Bar]]()
        for bar in self.bars:
            if bar.waits or bar.lane != Lane.COMPUTE:
                (waits if bar.waits else rings).setdefault(bar.line, []).append(bar)
        ending = {(bar.lane.split()[-1], bar.end): self.lines[line] for line, bars in rings.items() for bar in bars}
        line_of_wait: dict[str, int] = {}
        for index, op in enumerate(timeline.ops):
            if ends_collective(op):  # backward may repeat the wait for a collective of forward
                line_of_wait.setdefault(op.reads[0], self.line_of[index])
        collectives = []
        for index, op in enumerate(timeline.ops):
            if not starts_collective(op):
                continue
            exchange = op.exchange if isinstance(op, Compute) else None
            launch, wait = self.line_of[index], line_of_wait[op.writes[0]]
            launched, waited = self.lines[launch].end, self.lines[wait].start
            ring = rings.get(launch, [])
            wait_bars = [*waits.get(launch, ()), *waits.get(wait, ())]  # without overlap compute waits at the launch
            earlier_row = next(
                (ending[key].row for bar in ring if (key := (bar.lane.split()[-1], bar.start)) in ending), None
            )
            earlier = label(earlier_row.params, timeline.plan, gradients=earlier_row.gradients) if earlier_row else ""
            wire, exposed = (sum(bar.end - bar.start for bar in bars) for bars in (ring, wait_bars))
            queued = max(min((bar.start for bar in ring), default=launched) - launched, 0.0)
            collectives.append(
                Collective(
                    op=index,
                    kind=TENSOR if exchange else op.kind,
                    backward=op.backward,
                    unit=self.lines[launch].unit if exchange else timeline.params_of(op)[0].unit,
                    params=op.params,
                    label=f"{exchange.moves} of {op.reads[0]}"
                    if exchange
                    else label(op.params, timeline.plan, gradients=isinstance(op, Reduce)),
                    sent_bytes=timeline.traffic(op).sent,
                    launch=launch,
                    wait=wait,
                    launched=launched,
                    waited=waited,
                    wire_seconds=wire,
                    exposed_seconds=exposed,
                    why=why_there(op, self.traces.lines[index][0], self.explanations),
                    why_exposed=why_exposed(wire, exposed, max(waited - launched, 0.0), queued, earlier),
                )
            )
        return tuple(collectives)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        timeline = self.traces.timeline
        return sum(timeline.traffic(op).sent for op in timeline.ops)

"""Describes one program of a page: lines with their times, bars, collectives. Frozen data.

In: traces, a forecast of time and a forecast of memory. A line of the page is a line of a trace, or stands for what
runs around the phases: the digests of ZeRO-1, the loss, the optimizer's step::

    digests | forward line 0, 1, .. | loss | backward line 0, 1, .. | optimizer step

Positions of lines on the page are numbers from 0; those of operations are positions in ``Traces.timeline``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from thunder_zero.frontends.compiled import Traces
from thunder_zero.schedule.timeline import LAUNCHES, Kind
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

DIGESTS, LOSS = "digests", "loss"  # phases beside those of the traces and OPTIMIZER_STEP
AROUND = {
    DIGESTS: "# digests of this rank's rows, by which ranks know what to refresh",
    LOSS: "# the loss and its gradient",
    OPTIMIZER_STEP: "optimizer.step()",
}


@dataclass(frozen=True, slots=True)
class PageLine:
    """A line of the page.

    Attributes:
        phase: "digests", "forward", "loss", "backward" or "optimizer step".
        code: its Python statement.
        row: its meaning; None if it is no line of a trace.
        unit: the unit that it moves or computes with, or whose lines are around it.
        ops: positions of its operations in ``Traces.timeline``.
        start, end: when it runs on the compute lane, in seconds since the step began.
        memory: the position in ``Memory.lines`` of this line, or of the last line before it; None before the first.
    """

    phase: str
    code: str
    row: Row | None
    unit: str
    ops: tuple[int, ...]
    start: float
    end: float
    memory: int | None


@dataclass(frozen=True)
class PageProgram:
    """A program with its forecasts.

    Attributes:
        name: such as "ZeRO-3" or "measured times".
        traces: the program.
        estimate: its time, forecast or measured.
        memory: its forecast of memory; None if there is none.
        no_memory: why there is no forecast of memory; "" if there is one.
        note: what the times mean; "" for a forecast.
    """

    name: str
    traces: Traces
    estimate: Estimate
    memory: Memory | None
    no_memory: str = ""
    note: str = ""

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
        for index, op in enumerate(self.traces.timeline.ops):
            ops.setdefault(("backward" if op.backward else "forward", op.source[0]), []).append(index)
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
            unit = line_unit if row and row.kind is Kind.COMPUTE else unit
            code = short(row.line.code) if row else AROUND[phase]
            yield PageLine(phase, code, row, line_unit if row else "", line_ops, start, now, memory)

    def _rows(self) -> Iterator[tuple[str, Row | None]]:
        """Yield the phase of each line, and its row if it is a line of a trace."""
        around = {place for place in self._places if isinstance(place, str)}
        around |= {line.phase for line in self.memory.lines if line.position < 0} if self.memory else set()
        for phase in (DIGESTS, "forward", LOSS, "backward", OPTIMIZER_STEP):
            if phase in AROUND:
                yield from [(phase, None)] if phase in around else []
            else:
                yield from ((phase, row) for row in rows_of(self.traces, phase, self.memory))

    @cached_property
    def _places(self) -> tuple[int | str, ...]:
        """For each operation of the forecast of time: its position in the traces' timeline, or its phase around it."""
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
        """The position of the line of each operation, and of each phase that is a single line."""
        numbers: dict[int | str, int] = {}
        for number, line in enumerate(self.lines):
            numbers.update(dict.fromkeys(line.ops or (line.phase,), number))
        return numbers

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The bars of all lanes. Adjacent spans of a line are one bar."""
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
        """The lanes: compute, tensor parallelism, then each kind of launch on each wire that carries it."""
        used = {bar.lane for bar in self.bars}
        launches = (f"{kind} {lane}" for kind in LAUNCHES for lane in (Lane.SHARD, Lane.REPLICATE, Lane.TENSOR))
        return (str(Lane.COMPUTE), *(lane for lane in (str(Lane.TENSOR), *launches) if lane in used))

    @cached_property
    def units(self) -> tuple[tuple[str, int, int], ...]:
        """Runs of lines that compute with one unit: its path, its first line and its last line."""
        runs = groupby(self._computing(), key=lambda number: (self.lines[number].unit, self.lines[number].phase))
        return tuple((unit, (numbers := list(run))[0], numbers[-1]) for (unit, _), run in runs)

    def _computing(self) -> Iterator[int]:
        for number, line in enumerate(self.lines):
            if line.row is not None and line.row.kind is Kind.COMPUTE and line.end > line.start:
                yield number

    @cached_property
    def explanations(self) -> dict[str, Explanation]:
        """The explanation of each parameter, with this program's times."""
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
            if op.waits:  # backward may wait again for a collective of forward
                line_of_wait.setdefault(op.reads[0], self.line_of[index])
        collectives = []
        for index, op in enumerate(timeline.ops):
            if not op.launches:
                continue
            launch, wait = self.line_of[index], line_of_wait[op.writes[0]]
            launched, waited = self.lines[launch].end, self.lines[wait].start
            ring = rings.get(launch, [])
            held = [*waits.get(launch, ()), *waits.get(wait, ())]  # without overlap compute waits at the launch
            before = next(
                (ending[key].row for bar in ring if (key := (bar.lane.split()[-1], bar.start)) in ending), None
            )
            behind = label(before.params, timeline.plan, gradients=before.gradients) if before else ""
            wire, exposed = (sum(bar.end - bar.start for bar in bars) for bars in (ring, held))
            queued = max(min((bar.start for bar in ring), default=launched) - launched, 0.0)
            collectives.append(
                Collective(
                    op=index,
                    kind=op.over if op.moves else op.kind,
                    backward=op.backward,
                    unit=self.lines[launch].unit if op.moves else timeline.params_of(op)[0].unit,
                    params=op.params,
                    label=f"{op.moves} of {op.reads[0]}"
                    if op.moves
                    else label(op.params, timeline.plan, gradients=op.kind is Kind.REDUCE),
                    sent_bytes=timeline.bytes_sent(op),
                    launch=launch,
                    wait=wait,
                    launched=launched,
                    waited=waited,
                    wire_seconds=wire,
                    exposed_seconds=exposed,
                    why=why_there(op, self.explanations),
                    why_exposed=why_exposed(wire, exposed, max(waited - launched, 0.0), queued, behind),
                )
            )
        return tuple(collectives)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(map(self.traces.timeline.bytes_sent, self.traces.timeline.ops))

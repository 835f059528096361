"""What the page shows of one program: lines with their times, bars, collectives. Frozen data.

Traces, a forecast of time and one of memory go in. A line of the page is a line of a trace, or stands for what runs
around them: the digests of ZeRO-1, the loss, the optimizer's step::

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
    """A line.

    Attributes:
        phase: "digests", "forward", "loss", "backward" or "optimizer step".
        row: its meaning; None of what is no line of a trace.
        unit: that it moves or computes with, or whose lines are around it.
        ops: its operations, by their positions in ``Traces.timeline``.
        start, end: seconds since the step began, on the compute lane.
        memory: its position in ``Memory.lines``, or that of the last line before it that runs; None before the first.
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
        name: such as "forecast" or "measured times".
        estimate: its time: a forecast, or with what was measured.
        memory: its forecast; None if there is none, and ``no_memory`` says why.
        note: what the times mean, if they are not the forecast's.
    """

    name: str
    traces: Traces
    estimate: Estimate
    memory: Memory | None
    no_memory: str = ""
    note: str = ""

    @cached_property
    def lines(self) -> tuple[PageLine, ...]:
        """All lines, in the order in which they run."""
        return tuple(self._lines())

    def _lines(self) -> Iterator[PageLine]:
        spans: dict[int | str, list[Span]] = {}
        for span in self.estimate.spans:
            if span.lane is Lane.COMPUTE and span.seconds:
                spans.setdefault(self._places[span.op], []).append(span)
        ops: dict[tuple[str, int], list[int]] = {}
        for at, op in enumerate(self.traces.timeline.ops):
            ops.setdefault(("backward" if op.backward else "forward", op.source[0]), []).append(at)
        ran = {(line.phase, line.position): at for at, line in enumerate(self.memory.lines if self.memory else ())}
        now, unit, memory = 0.0, "", None
        for phase, row in self._rows():
            position = row.line.position if row else -1
            own = tuple(ops.get((phase, position), ()))
            of = [span for at in own or (phase,) for span in spans.get(at, ())]
            start, end = min([span.start for span in of], default=now), max([span.end for span in of], default=now)
            memory, now = ran.get((phase, position), memory), max(now, end)
            named = self.traces.plan.by_name[row.params[0]].unit if row and row.params else unit
            unit = named if row and row.kind is Kind.COMPUTE else unit
            code = short(row.line.code) if row else AROUND[phase]
            yield PageLine(phase, code, row, named if row else "", own, start, now, memory)

    def _rows(self) -> Iterator[tuple[str, Row | None]]:
        """The phase of each line, and its row if a trace has it."""
        around = {place for place in self._places if isinstance(place, str)}
        around |= {line.phase for line in self.memory.lines if line.position < 0} if self.memory else set()
        for phase in (DIGESTS, "forward", LOSS, "backward", OPTIMIZER_STEP):
            if phase in AROUND:
                yield from [(phase, None)] if phase in around else []
            else:
                yield from ((phase, row) for row in rows_of(self.traces, phase, self.memory))

    @cached_property
    def _places(self) -> tuple[int | str, ...]:
        """Of each operation of the forecast of time: its position in the traces' timeline, or the phase around it."""
        ops, at = self.traces.timeline.ops, 0
        found: list[int | str] = []
        for op in self.estimate.timeline.ops:
            if at < len(ops) and op is ops[at]:
                found.append(at)
                at += 1
            else:
                found.append(DIGESTS if at == 0 else LOSS if at < len(ops) - 1 else OPTIMIZER_STEP)
        return tuple(found)

    @cached_property
    def line_of(self) -> dict[int | str, int]:
        """The line of each operation, and of each phase that is one line."""
        found: dict[int | str, int] = {}
        for number, line in enumerate(self.lines):
            found.update(dict.fromkeys(line.ops or (line.phase,), number))
        return found

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """Those of all lanes; what a line computes without a pause is one bar."""
        made: list[Bar] = []
        for span in self.estimate.spans:
            op, line = self.estimate.timeline.ops[span.op], self.line_of[self._places[span.op]]
            is_named = span.lane in (Lane.COMPUTE, Lane.TENSOR)
            lane = str(span.lane) if is_named else f"{op.kind} {span.lane}"
            bar = Bar(lane, line, span.start, span.end, span.waits)
            last = made[-1] if made else bar
            if (last.lane, last.line, last.end, last.waits) == (lane, line, bar.start, bar.waits) and last is not bar:
                made[-1] = Bar(lane, line, last.start, bar.end, bar.waits)
            elif span.end > span.start:
                made.append(bar)
        return tuple(made)

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        """Compute, collectives of slices, then each kind of launch on each wire that carries it."""
        found = {bar.lane for bar in self.bars}
        launches = (f"{kind} {lane}" for kind in LAUNCHES for lane in (Lane.SHARD, Lane.REPLICATE, Lane.TENSOR))
        return (str(Lane.COMPUTE), *(lane for lane in (str(Lane.TENSOR), *launches) if lane in found))

    @cached_property
    def units(self) -> tuple[tuple[str, int, int], ...]:
        """Runs of lines that compute with one unit: its path, the first line and the last; what is around is none's."""
        runs = groupby(self._computing(), key=lambda at: (self.lines[at].unit, self.lines[at].phase))
        return tuple((unit, (ats := list(run))[0], ats[-1]) for (unit, _), run in runs)

    def _computing(self) -> Iterator[int]:
        for at, line in enumerate(self.lines):
            if line.row is not None and line.row.kind is Kind.COMPUTE and line.end > line.start:
                yield at

    @cached_property
    def explanations(self) -> dict[str, Explanation]:
        """What ``explain`` says of each parameter, with this program's times."""
        places = ((span, self._places[span.op]) for span in self.estimate.spans)
        own = [Span(at, one.lane, one.start, one.end, None, one.waits) for one, at in places if isinstance(at, int)]
        return explain_all(self.traces, own, self.estimate.device.name)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Each launch, in the order in which they start."""
        timeline, rings, waits = self.traces.timeline, dict[int, list[Bar]](), dict[int, list[Bar]]()
        for bar in self.bars:
            if bar.waits or bar.lane != Lane.COMPUTE:
                (waits if bar.waits else rings).setdefault(bar.line, []).append(bar)
        ending = {(bar.lane.split()[-1], bar.end): self.lines[line] for line, of in rings.items() for bar in of}
        line_of_wait: dict[str, int] = {}
        for at, op in enumerate(timeline.ops):
            if op.waits:  # backward may wait again for a collective of forward
                line_of_wait.setdefault(op.reads[0], self.line_of[at])
        found = []
        for at, op in enumerate(timeline.ops):
            if not op.launches:
                continue
            launch, wait = self.line_of[at], line_of_wait[op.writes[0]]
            launched, waited = self.lines[launch].end, self.lines[wait].start
            own = rings.get(launch, [])
            held = [*waits.get(launch, ()), *waits.get(wait, ())]  # without overlap compute waits at the launch
            before = next(
                (ending[key].row for bar in own if (key := (bar.lane.split()[-1], bar.start)) in ending), None
            )
            behind = label(before.params, timeline.plan, gradients=before.gradients) if before else ""
            wire, exposed = (sum(bar.end - bar.start for bar in bars) for bars in (own, held))
            queued = max(min((bar.start for bar in own), default=launched) - launched, 0.0)
            found.append(
                Collective(
                    op=at,
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
        return tuple(found)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends in a step."""
        return sum(map(self.traces.timeline.bytes_sent, self.traces.timeline.ops))

"""``tz.tools.step_table``: a row for each line of a step, which all views read.

In: traces, and on request a forecast of memory, and times, forecast or measured. Out: :class:`Table`. A row is a line
of a trace, or a whole phase without a trace: the digests of ZeRO-1, the loss, the optimizer's step::

    digests | forward line 0, 1, .. | loss | backward line 0, 1, .. | optimizer step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.schedule.ops import Compute, ends_collective
from thunder_zero.schedule.prefetch import Bound, bounds
from thunder_zero.tools.devices.device import Device, Lane
from thunder_zero.tools.devices.named import device_of
from thunder_zero.tools.forecast.around import memory_and_timeline, whole_step
from thunder_zero.tools.forecast.figures import OPTIMIZER_STEP, Memory, MemoryLine
from thunder_zero.tools.forecast.for_loss import Loss, for_loss
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.printing.text import place_of
from thunder_zero.tools.printing.words import summed_up
from thunder_zero.tools.table.rows import COMPUTES, Row, columns_of
from thunder_zero.tools.time.estimate import Estimate, step_time
from thunder_zero.tools.time.lanes import Span
from thunder_zero.traces.compiled import Traces
from thunder_zero.traces.operators import operator_of

import thunder
from thunder.core.codeutils import get_source_line
from thunder.core.module import ThunderModule
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import tracectx

THUNDER = Path(thunder.__file__).parent
Cells = dict[str, Any]  # the columns of a row by name
DIGESTS, LOSS = "digests", "loss"  # phases without a trace, beside OPTIMIZER_STEP
AROUND = {
    DIGESTS: "# digests of this rank's rows, by which ranks know what to refresh",
    LOSS: "# the loss and its gradient",
    OPTIMIZER_STEP: "optimizer.step()",
}
ORDER = (DIGESTS, "forward", LOSS, "backward", OPTIMIZER_STEP)


@dataclass(frozen=True)
class Table:
    """The lines of one program's step, in the order in which they run.

    Attributes:
        traces: the program.
        all: the rows of all lines.
        memory: the forecast of memory, if any.
        time: the times of operations, forecast or measured, if any.
        spans: (index of the row, span) pairs of the times, in their order.
        no_memory: the reason why there is no forecast of memory, if one was tried.
    """

    traces: Traces
    all: tuple[Row, ...]
    memory: Memory | None = None
    time: Estimate | None = None
    spans: tuple[tuple[int, Span], ...] = ()
    no_memory: str = ""

    def __repr__(self) -> str:
        return summed_up(self, f"{len(self.all)} rows; {place_of(self.traces.plan)}")

    def rows(self, where: Callable[[Row], bool] = lambda row: True) -> tuple[Row, ...]:
        """Return the rows for which ``where`` is true (default: all)."""
        return tuple(row for row in self.all if where(row))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as data: ``pandas.DataFrame(table.as_dicts())``."""
        return list(map(asdict, self.all))

    @cached_property
    def place(self) -> dict[int | str, int]:
        """The index of the row of each operation of ``traces.timeline``, and of each phase without a trace."""
        keys = ((row.phase if row.position < 0 else row.op, index) for index, row in enumerate(self.all))
        return {key: index for key, index in keys if key is not None}

    def of(self, op: int) -> Row:
        """Return the row of an operation of ``traces.timeline``."""
        return self.all[self.place[op]]

    @cached_property
    def by_param(self) -> dict[str, list[Row]]:
        """The rows of each parameter, keyed by its path."""
        rows: dict[str, list[Row]] = {param.path: [] for param in self.traces.plan.params}
        for row in self.all:
            for path in row.params:
                rows[path].append(row)
        return rows

    @cached_property
    def ends(self) -> dict[str, int]:
        """The operation that first waits for each collective, keyed by the collective's handle."""
        ops = enumerate(self.traces.timeline.ops)
        waits = [(op.reads[0], index) for index, op in ops if ends_collective(op)]
        return dict(reversed(waits))  # backward may repeat the wait for a collective of forward

    @cached_property
    def last_reads(self) -> dict[str, int]:
        """The last computation that reads each value."""
        ops = enumerate(self.traces.timeline.ops)
        return {name: index for index, op in ops if isinstance(op, Compute) for name in op.reads}

    @cached_property
    def bounds(self) -> dict[str, tuple[int, Bound]]:
        """The operation behind which each gather starts, and the reason why not earlier, keyed by handle."""
        return bounds(self.traces.timeline)


def step_table(
    model_or_traces: ThunderModule | Traces,
    *,
    device: Device | str | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
) -> Table:
    """Return a row for each line of a step, with its meaning, its bytes and, for a device, its times.

    >>> table = tz.tools.step_table(traces, device="h100")
    >>> sum(row.sent or 0 for row in table.rows(lambda row: row.unit == "blocks.0"))

    Args:
        loss, optimizer: as for :func:`thunder_zero.tools.memory` (default: the step has no loss and no optimizer).
    """
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    traces = for_loss(traces, loss) if loss else traces
    memory, no_memory = None, ""
    try:
        memory, timeline = memory_and_timeline(traces, loss=loss, optimizer=optimizer)
    except NoForecast as error:
        timeline = whole_step(traces, loss, optimizer) if device and traces.backward else traces.timeline
        no_memory = str(error)
    time = step_time(timeline, device_of(device), model=traces.lifted) if device else None
    return replace(table_of(traces, memory, time), no_memory=no_memory)


def table_of(
    traces: Traces, memory: Memory | None = None, time: Estimate | None = None, *, codes: bool = True
) -> Table:
    """Return the table of a program, with a forecast of memory and with times if they are given.

    Printing code takes most of the time: without ``codes``, :func:`with_code` prints a single line.
    """
    places = operation_places(traces, time) if time else ()
    around = {place for place in places if isinstance(place, str)}
    around |= {line.phase for line in memory.lines if line.position < 0} if memory else set()
    rows: list[Cells] = []
    for phase in ORDER:
        if phase in AROUND:
            rows += [{"phase": phase, "position": -1, "code": AROUND[phase]}] * (phase in around)
        else:
            unit = next((row["unit"] for row in reversed(rows) if row.get("kind") in COMPUTES), "")
            lines, backward = _lines(traces, phase, codes), phase == "backward"
            rows += columns_of(lines, traces.timeline, traces.lines, backward=backward, unit=unit)
    if memory:
        _add_memory(rows, memory)
    spans: tuple[tuple[int, Span], ...] = ()
    if time:
        keys = {row.get("op", row["phase"]): index for index, row in enumerate(rows)}
        spans = tuple((keys[places[span.op]], span) for span in time.spans)
        _add_times(rows, spans)
    return Table(traces, tuple(Row(**row) for row in rows), memory, time, spans)


def operation_places(traces: Traces, time: Estimate) -> tuple[int | str, ...]:
    """Return each timed operation's position in ``traces.timeline``, or its phase outside the traces."""
    ops, index = traces.timeline.ops, 0
    places: list[int | str] = []
    for op in time.timeline.ops:
        if index < len(ops) and op is ops[index]:
            places.append(index)
            index += 1
        else:
            places.append(DIGESTS if index == 0 else LOSS if index < len(ops) - 1 else OPTIMIZER_STEP)
    return tuple(places)


def with_code(row: Row, traces: Traces) -> Row:
    """Return a row of a trace with its code and its origin."""
    trace = traces.forward if row.phase == "forward" else traces.backward
    assert trace is not None, "it has this line"
    with tracectx(trace):
        return _with_code(row, trace.bound_symbols[row.position])


def _with_code(row: Row, bsym: BoundSymbol) -> Row:
    return replace(row, code="\n".join(bsym.python(indent=0, print_depth=1)), origin=_origin(bsym, row.phase))


def _lines(traces: Traces, phase: str, codes: bool) -> Iterator[Row]:
    """Yield the lines of a phase, except lines that are only comments, which name the inputs."""
    trace = traces.forward if phase == "forward" else traces.backward
    if trace is None:
        return
    with tracectx(trace):
        for position, bsym in enumerate(trace.bound_symbols):
            row = Row(phase, position, "")
            row = _with_code(row, bsym) if codes else row
            if not codes or any(not line.startswith("#") for line in row.code.splitlines()):
                yield row


def _origin(bsym: BoundSymbol, phase: str) -> str:
    """Return the user's line, such as ``gpt.py:98  x = self.embedding(tokens)``; "" if there is none."""
    name, positions = bsym.source_filename, bsym.source_positions
    if name is None or positions is None or positions.lineno is None or Path(name).is_relative_to(THUNDER):
        return ""
    if phase == "backward" and operator_of(bsym) is None:  # a recorded position would be of a line of forward
        return ""
    prefix = "gradient of " if phase == "backward" else ""
    return f"{prefix}{Path(name).name}:{positions.lineno}  {get_source_line(name, positions.lineno).strip()}"


def _add_memory(rows: Iterable[Cells], memory: Memory) -> None:
    """Add the bytes. A line that the forecast leaves out has the bytes alive of the line before it."""
    indices = {(line.phase, line.position): index for index, line in enumerate(memory.lines)}
    allocated, freed = ([Counter[str]() for _ in memory.lines] for _ in range(2))
    for storage in memory.storages:
        if storage.line >= 0:
            allocated[storage.line][str(storage.kind)] += storage.nbytes
        if storage.freed is not None:
            freed[storage.freed][str(storage.kind)] += storage.nbytes
    before: MemoryLine | None = None
    for row in rows:
        index = indices.get((row["phase"], row["position"]))
        if index is not None:
            before = memory.lines[index]
            row |= {"allocated": dict(allocated[index]), "freed": dict(freed[index])}
            row["is_peak"] = before is memory.peak_line
        if before:
            row |= {"alive": before.total, "highest": before.highest}


def _add_times(rows: Iterable[Cells], spans: Iterable[tuple[int, Span]]) -> None:
    by_row: dict[int, list[Span]] = {}
    for index, span in spans:
        by_row.setdefault(index, []).append(span)
    now = 0.0
    for index, row in enumerate(rows):
        in_row = by_row.get(index, [])
        computed = [span for span in in_row if span.lane is Lane.COMPUTE and span.seconds]
        row["start"] = min([span.start for span in computed], default=now)
        row["end"] = now = max([now, *(span.end for span in computed)])
        row["exposed"] = sum(span.seconds for span in computed if span.waits)
        for wire in [span for span in in_row if span.lane is not Lane.COMPUTE][-1:]:
            row |= {"lane": str(wire.lane), "wire_start": wire.start, "wire_end": wire.end}

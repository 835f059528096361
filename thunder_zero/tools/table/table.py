"""``tz.tools.step_table``: a row for each line of a step, which all views read.

In: traces, and on request a forecast of memory, and times, forecast or measured. Out: :class:`Table`. A row is a line
of a trace, or a whole phase without a trace: the digests of ZeRO-1, the loss, the optimizer's step::

    digests | forward line 0, 1, .. | loss | backward line 0, 1, .. | optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from thunder_zero.capture.zero_module import as_traces
from thunder_zero.plan.amounts import summed_up
from thunder_zero.plan.outer import SITE
from thunder_zero.schedule.ops import Compute, ends_collective
from thunder_zero.schedule.prefetch import Bound, bounds
from thunder_zero.spmd.of_trace import TraceTypes, types_of_trace
from thunder_zero.tools.devices.device import Cost, Device, Lane, Link, device_of
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.for_loss import Loss
from thunder_zero.tools.forecast.memory import memory_of, recorder_of
from thunder_zero.tools.forecast.rehearsal import MakeOptimizer
from thunder_zero.tools.forecast.watch import NoForecast
from thunder_zero.tools.printing.words import place_of
from thunder_zero.tools.table.lines import AROUND, in_order, traced_rows
from thunder_zero.tools.table.rows import DIGESTS, LOSS, OPTIMIZER_STEP, Row, totals
from thunder_zero.tools.time.estimate import Estimate, time_of
from thunder_zero.tools.time.lanes import Span
from thunder_zero.traces.compiled import Traces

from thunder.core.module import ThunderModule


@dataclass(frozen=True)
class Table:
    """The lines of one program's step, in the order in which they run."""

    traces: Traces  # the program
    all_rows: tuple[Row, ...]
    memory: Memory | None = None  # the forecast of memory, if any
    time: Estimate | None = None  # the times of operations, forecast or measured, if any
    spans: tuple[tuple[int, Span], ...] = ()  # (index of the row, span) pairs of the times, in their order
    no_memory: str = ""  # the reason why there is no forecast of memory, if one was tried
    types: TraceTypes | None = None  # what each value is on each axis of the mesh, if asked for

    def __repr__(self) -> str:
        return summed_up(self, f"{len(self.all_rows)} rows; {place_of(self.traces.plan)}")

    def rows(self, where: Callable[[Row], bool] = lambda row: True) -> tuple[Row, ...]:
        """Return the rows for which ``where`` is true (default: all)."""
        return tuple(filter(where, self.all_rows))

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as data: ``pandas.DataFrame(table.as_dicts())``."""
        return list(map(asdict, self.all_rows))

    def typed(self) -> Table:
        """Return the table with the types of what each line writes."""
        found, phases = types_of_trace(self.traces), {"forward": self.traces.forward, "backward": self.traces.backward}
        rows = []
        for row in self.all_rows:
            trace = phases.get(row.phase) if row.position >= 0 else None
            written = trace.bound_symbols[row.position].flat_proxy_outs if trace is not None else ()
            texts = dict.fromkeys(found.values[proxy.name] for proxy in written if proxy.name in found.values)
            rows.append(replace(row, types="; ".join(texts)))
        return replace(self, all_rows=tuple(rows), types=found)

    @cached_property
    def index_of(self) -> dict[int | str, int]:
        """The index of the row of each operation of ``traces.timeline``, and of each phase without a trace."""
        keys = (row.phase if row.position < 0 else row.op for row in self.all_rows)
        return {key: index for index, key in enumerate(keys) if key is not None}

    @property
    def sent(self) -> int:
        """The bytes that this rank sends."""
        return totals(self.all_rows)["sent"]

    def of(self, op: int) -> Row:
        """Return the row of an operation of ``traces.timeline``."""
        return self.all_rows[self.index_of[op]]

    @cached_property
    def by_param(self) -> dict[str, list[Row]]:
        """The rows of each parameter, keyed by its path."""
        rows: dict[str, list[Row]] = {param.path: [] for param in self.traces.plan.params}
        for row in self.all_rows:
            for path in row.params:
                rows[path].append(row)
        return rows

    def wait_of(self, launch: Row) -> Row:
        """Return the row that first waits for a collective. ``launch`` is the row that launches it."""
        return self.of(self._ends[self.traces.timeline.ops[launch.ran].writes[0]])

    @cached_property
    def _ends(self) -> dict[str, int]:
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
    between: Link | str | None = None,
    reserve: int = 0,
) -> Table:
    """Return a row for each line of a step, with its meaning, its bytes and, for a device, its times.

    >>> table = tz.tools.step_table(traces, device="h100")
    >>> sum(row.sent or 0 for row in table.rows(where=lambda row: row.unit == "blocks.0"))

    ``loss``, ``optimizer`` and ``reserve`` are as for :func:`thunder_zero.tools.memory` (default: the step has none).
    With a device, a loss that reads values raises; without one, ``no_memory`` has the reason. ``between`` is the link
    between sites, as for :func:`thunder_zero.tools.estimate`; without it, exchanges of an outer step have bytes and no
    times.
    """
    traces = as_traces(model_or_traces)
    recorder, memory, no_memory = recorder_of(traces, loss, optimizer, reserve=reserve), None, ""
    traces = recorder.traces
    try:
        memory = memory_of(recorder, reserve)
    except NoForecast as error:
        no_memory = str(error)
    time = time_of(recorder, device_of(device), between) if device else None
    return replace(table_of(traces, memory, time), no_memory=no_memory)


def table_of(traces: Traces, memory: Memory | None = None, time: Estimate | None = None) -> Table:
    """Return the table of a program, with a forecast of memory and with times if they are given."""
    rows = memory.lines if memory else tuple(traced_rows(traces))
    if time is None:
        return Table(traces, rows, memory)
    keys = _keys(traces, time)
    added = {key for key in keys if isinstance(key, str)} - {row.phase for row in rows}
    ordered = in_order(rows, {phase: AROUND[phase] for phase in added})
    table = Table(traces, tuple(ordered), memory, time)
    indices = [table.index_of[key] for key in keys]
    indices += [index for index, row in enumerate(ordered) if row.over == SITE]
    spans = tuple((indices[span.op], span) for span in time.spans)
    return replace(table, all_rows=tuple(with_times(ordered, spans, time.costs)), spans=spans)


def _keys(traces: Traces, time: Estimate) -> list[int | str]:
    """Return each timed operation's position in ``traces.timeline``, or its phase outside the traces."""
    ops = traces.timeline.ops
    keys: list[int | str] = []
    index = 0
    for op in time.timeline.ops:
        if index < len(ops) and op is ops[index]:
            keys.append(index)
            index += 1
        else:
            keys.append(DIGESTS if index == 0 else LOSS if index < len(ops) - 1 else OPTIMIZER_STEP)
    return keys


def with_times(rows: Iterable[Row], spans: Iterable[tuple[int, Span]], costs: Sequence[Cost]) -> Iterator[Row]:
    """Yield rows with the times of their spans, which have the index of their row."""
    by_row: dict[int, list[Span]] = {}
    for index, span in spans:
        by_row.setdefault(index, []).append(span)
    now = 0.0
    for index, row in enumerate(rows):
        in_row = by_row.get(index, [])
        computed = [span for span in in_row if span.lane is Lane.COMPUTE and span.seconds]
        start = min([span.start for span in computed], default=now)
        now = max([now, *(span.end for span in computed)])
        exposed = sum(span.seconds for span in computed if span.waits)
        worked = [costs[span.op] for span in computed if not span.waits]
        flops = row.flops or sum(cost.flops for cost in worked)
        moved = row.moved or sum(cost.traffic_bytes for cost in worked)
        on_wire: dict[str, Any] = {}
        for wire in [span for span in in_row if span.lane is not Lane.COMPUTE][-1:]:
            on_wire = {"lane": str(wire.lane), "wire_start": wire.start, "wire_end": wire.end}
        yield replace(row, start=start, end=now, exposed=exposed, flops=flops, moved=moved, **on_wire)

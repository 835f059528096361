"""``tz.tools.save_timeline``: writes the forecast of a step for Perfetto, with a measured profile."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from thunder_zero.capture.zero_module import as_traces
from thunder_zero.schedule.names import label_of
from thunder_zero.schedule.ops import Work
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Device, Lane, Link, device_of
from thunder_zero.tools.printing.words import place_of
from thunder_zero.tools.table.rows import Row, label
from thunder_zero.tools.table.table import Table, table_of
from thunder_zero.tools.time.estimate import estimate
from thunder_zero.tools.time.lanes import Span
from thunder_zero.traces.compiled import Traces

from thunder.core.module import ThunderModule

Event = dict[str, Any]  # an event in Chrome's trace event format, which Perfetto reads
MICRO = 1e6  # the format's unit of time is a microsecond
LANES = {
    Lane.COMPUTE: "compute",
    Lane.SHARD: "wire of the shard group",
    Lane.REPLICATE: "wire of the replicate group",
    Lane.TENSOR: "wire of tensor parallelism",
    Lane.SITE: "link between sites",
}


def save_timeline(
    path: str | PathLike[str],
    model_or_traces: ThunderModule | Traces,
    *,
    device: Device | str,
    measured: str | PathLike[str] | None = None,
    between: Link | str | None = None,
) -> None:
    """Write the forecast of a step for https://ui.perfetto.dev, optionally beside a profile of measured steps.

    The file is JSON in Chrome's trace event format, with a lane for compute, a lane for each wire, and a counter of
    gathered bytes. Each event names its parameters, its line of the trace, its FLOPs and bytes. The profile is shifted
    in time, so that its first launch of a collective coincides with the forecast's first launch.

    >>> with torch.profiler.profile() as profile:
    ...     step()
    >>> profile.export_chrome_trace("measured.json")
    >>> tz.tools.save_timeline("trace.json", model, device="h100", measured="measured.json")

    ``measured`` is a file from ``torch.profiler.profile.export_chrome_trace``, which may be compressed (``.gz``).
    ``between`` is the link between sites, as for :func:`thunder_zero.tools.estimate`.
    """
    device, traces = device_of(device), as_traces(model_or_traces)
    table = table_of(traces, time=estimate(traces, device, between=between))
    profile = [] if measured is None else events_of(Path(measured))
    pid = 1 + max((event["pid"] for event in profile if isinstance(event.get("pid"), int)), default=0)
    title = f"forecast: {place_of(traces.plan)}, {device.name}"
    events = [*_forecast_events(table, title, pid), *_aligned(profile, table)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _forecast_events(table: Table, title: str, pid: int) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": -1}}
    lanes = [lane for lane in LANES if any(span.lane is lane for _, span in table.spans)]
    for number, lane in enumerate(lanes):
        yield {"ph": "M", "pid": pid, "tid": number, "name": "thread_name", "args": {"name": LANES[lane]}}
    for line, span in table.spans:
        if span.seconds > 0:
            place = {"ph": "X", "pid": pid, "tid": lanes.index(span.lane), "cat": "forecast"}
            times = {"ts": span.start * MICRO, "dur": span.seconds * MICRO}
            yield place | _named(span, table.all_rows[line], table.traces.timeline) | times
    previous = None
    for row in table.rows(where=lambda row: row.op is not None):
        if row.unsharded != previous:
            counter: Event = {"ph": "C", "pid": pid, "name": "gathered bytes", "args": {"bytes": row.unsharded}}
            yield counter | {"ts": (row.end or 0.0) * MICRO}
        previous = row.unsharded


def _named(span: Span, row: Row, timeline: Timeline) -> Event:
    args: Event = {"line": row.statement, "phase": row.phase, "parameters": list(row.params)}
    if span.lane is not Lane.COMPUTE:
        return {"name": _label(row, timeline), "args": args | {"sent_bytes": row.sent}}
    if span.waits:
        name = _label(row, timeline)
        return {"name": f"wait for {name}" if row.sent is not None else name, "args": args}
    work = row.work or str(Work.NONE)
    name = label(row.params, timeline.plan, gradients=row.gradients) or work
    return {"name": name, "args": args | {"work": work, "flops": row.flops, "traffic_bytes": row.moved}}


def _label(row: Row, timeline: Timeline) -> str:
    """Return the label of a launch, a wait or an exchange with other sites."""
    return row.statement if row.op is None else label_of(timeline.ops[row.op], timeline)


def events_of(path: Path) -> list[Event]:
    """Return the events of a profile's file, which is in Chrome's trace event format."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        profile = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); give what profile.export_chrome_trace wrote") from None
    events = profile.get("traceEvents") if isinstance(profile, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} has no list of traceEvents; give what profile.export_chrome_trace wrote")
    return events


def _aligned(events: list[Event], table: Table) -> list[Event]:
    """Shift the events of a profile in place to the times of the forecast, and return them.

    The first common launch of a collective is aligned. Otherwise the profile's first event is aligned.
    """
    launched = [(table.all_rows[line], span.start) for line, span in table.spans if span.lane is not Lane.COMPUTE]
    names = {_label(row, table.traces.timeline): start * MICRO for row, start in reversed(launched)}
    timed = [event for event in events if isinstance(event.get("ts"), int | float)]
    launches = [event for event in timed if event.get("name") in names]
    first: Event = min(launches or timed, key=lambda event: event["ts"], default={"ts": 0.0})
    offset = names.get(first.get("name", ""), 0.0) - first["ts"]
    for event in timed:
        event["ts"] += offset
    return events

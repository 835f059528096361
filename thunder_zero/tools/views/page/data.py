"""Turns the table of a step into JSON data, which ``--json`` prints and ``page.js`` draws.

Lines, bars and tensors are tables with a list for each column. Units, parameters and origins are list indices. Numbers
place what is drawn: times are seconds since the step began, and a line begins when the line before it ends. What is
printed are words. The page numbers the rows of the table from 0: these are its lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.outer import SITE
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.ops import Compute
from thunder_zero.spmd.picture import StepPicture
from thunder_zero.spmd.verdict import Verdict
from thunder_zero.tools.devices.device import Device, Lane
from thunder_zero.tools.forecast.figures import LARGEST, Holds, Memory
from thunder_zero.tools.printing.words import place_of, short
from thunder_zero.tools.table.recorded import first_reads, recorded
from thunder_zero.tools.table.rows import CODES, COMPUTES, Row, label, row_label, totals
from thunder_zero.tools.table.table import Table
from thunder_zero.tools.time.estimate import Estimate
from thunder_zero.tools.time.lanes import Span
from thunder_zero.tools.views.diff import COLUMNS, alike, difference_of, require_one_module
from thunder_zero.tools.views.explain import explanation_of, why_launch

Data = dict[str, Any]
DIGITS = 10  # seconds are rounded to a tenth of a nanosecond
ARROW = "\N{RIGHTWARDS ARROW}"
LANES = (Lane.COMPUTE, TENSOR, "gather", "reduce", SITE)
WAITING = {"gather": "gathers", "reduce": "reductions", TENSOR: "tensor parallelism", SITE: "other sites"}
# the figures of a program: their words and their texts
FIGURES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "step_seconds": ("time of a step", duration),
    "compute_seconds": ("of it, compute", duration),
    "exposed_seconds": ("of it, waiting for communication", duration),
    "sites_seconds": ("of it, waiting for other sites", duration),
    "peak_bytes": ("peak memory of forward and backward", size),
    "at_rest_bytes": ("memory between steps", size),
    "optimizer_step_bytes": ("peak memory of the optimizer's step", size),
    "sent_bytes": ("sent by this rank", size),
    "gathers": ("gathers", "{:,}".format),
    "reductions": ("reductions", "{:,}".format),
    "slices": ("collectives of slices", "{:,}".format),
    "mfu": ("MFU", "{:.1%}".format),
}

BLOCK = 512  # bytes: to their multiples CUDA's caching allocator rounds
NOTE = (
    "Operators are those of a CPU. Times are a forecast: the host runs ahead, a gather starts when the one before it "
    "was read, and compute waits for a collective where its result is first read."
)
OF_ONE_KIND = (Lane.COMPUTE, Lane.TENSOR, Lane.SITE)  # other lanes have gathers and reductions
OF_SOME = ("slices", "sites_seconds")  # figures that are left out where they are 0


def data_of(name: str, table: Table, note: str = "") -> Data:
    """Return the data of a table with times. ``note`` is the origin of measured times; "" for a forecast."""
    plan, memory, time = table.traces.plan, table.memory, table.time
    assert time is not None, "a page has times"
    exchanges = f"{time.exchanges.described(time.seconds_alone)}." if time.exchanges else ""
    no_memory = table.no_memory and f"There is no forecast of memory: {table.no_memory}."
    head = {
        "name": name,
        "place": place_of(plan),
        "stage": STAGES[plan.policy.stage].name,
        "note": " ".join(filter(None, [note, exchanges, no_memory])),
    }
    params = {param.path: (prod(param.shape), str(explanation_of(table, param))) for param in plan.params}
    labels = [row_label(row, plan) for row in table.all_rows]
    return head | _drawn(table.all_rows, table.spans, plan.units, params, labels, _collectives(table), memory, time)


def data_of_step(verdict: Verdict, picture: StepPicture, device: Device) -> Data:
    (memory, time, spans), reads = recorded(picture, device), first_reads(picture.lines)
    rows, labels = memory.lines, [_label(row) for row in memory.lines]
    gradients = {item.path: f"{item.path}: gradient {item}" for item in verdict.gradients}
    slack = size(sum(-storage.nbytes % BLOCK for storage in memory.at_peak))
    head = {
        "name": "the step",
        "place": f"rank 0 of {', '.join(f'{axis}={ranks}' for axis, ranks in picture.axes.items())}",
        "stage": "",
        "note": f"{NOTE} A GPU's allocator rounds tensors up, by {slack} at the peak, and its fragments are extra.",
    }
    collectives = []
    for launch, wait in reads.items():
        row, exposed = rows[launch], rows[wait].exposed if rows[wait].end == rows[launch].wire_end else 0.0
        why = f"it takes {duration(row.wire_seconds)} on the wire of {row.over}" if exposed else ""
        name = labels[launch] or row.code.partition(":")[0]
        collectives.append(_collective(rows, launch, wait, name, exposed, row.origin, why))
    units = dict.fromkeys(["", *(row.unit for row in rows)])
    params = {path: (numel, gradients.get(path, path)) for path, (_, numel) in picture.parameters.items()}
    return head | _drawn(rows, spans, units, params, labels, collectives, memory, time)


def _label(row: Row) -> str:
    return f"{row.params[0]}, {len(row.params) - 1} more" if row.params[2:] else ", ".join(row.params)


def _drawn(
    rows: Sequence[Row],
    spans: Iterable[tuple[int, Span]],
    units: Iterable[str],
    params: Mapping[str, tuple[int, str]],
    labels: Sequence[str],
    collectives: Sequence[Data],
    memory: Memory | None,
    time: Estimate,
) -> Data:
    """Return what the page draws of a step. ``params`` has the elements of each parameter, and its explanation."""
    bars, numbers = _bars(rows, spans), {unit: index for index, unit in enumerate(units)}
    used = dict.fromkeys([(str(Lane.COMPUTE), ""), *(bar["lane"] for bar in bars)])
    lanes = sorted(used, key=lambda lane: LANES.index(lane[0]))
    for bar in bars:
        times = {moment: round(bar[moment], DIGITS) for moment in ("start", "end")}
        took = duration(bar["end"] - bar["start"])
        bar |= {"lane": lanes.index(bar["lane"]), "waits": int(bar["waits"]), "took": took, **times}
    wires = {wire for _, wire in lanes if wire}
    phases = groupby(range(len(rows)), key=lambda line: rows[line].phase)
    sizes = {path: numel for path, (numel, _) in params.items()}
    data = {
        "figures": _figures(rows, memory, time),
        "parameters": [{"path": path, "explained": explained} for path, (_, explained) in params.items()],
        "device": time.device.name,
        "left_out": [] if memory is None else list(memory.excluded),
        "units": list(numbers),
        "phases": [{"name": phase, "last": max(lines)} for phase, lines in phases],
        "lines": _lines(rows, sizes, labels, numbers, collectives),
        "rows": list(_rows(rows)),
        "runs": list(_runs(rows, numbers)),
        "lanes": [
            ", ".join([WAITING.get(kind, kind), *([wire] if wire and wires - {wire} else [])]) for kind, wire in lanes
        ],
        "bars": _columns(bars),
        "collectives": collectives,
        "memory": None if memory is None else _memory(rows, memory, time.device),
    }
    return data | {"bound": bound_of(data)}


def _figures(rows: Sequence[Row], memory: Memory | None, time: Estimate) -> dict[str, float | None]:
    sums = totals(rows)
    return {
        "step_seconds": time.seconds,
        "compute_seconds": time.compute_seconds,
        "exposed_seconds": time.exposed_seconds,
        "sites_seconds": time.exposed_on.get(Lane.SITE, 0.0),
        "peak_bytes": memory.peak if memory else None,
        "at_rest_bytes": memory.at_rest if memory else None,
        "optimizer_step_bytes": memory.optimizer_step if memory else None,
        "sent_bytes": sums["sent"],
        "gathers": sums["gathers"],
        "reductions": sums["reduces"],
        "slices": sums["slices"],
        "mfu": time.mfu,
    }


def _text(name: str, figure: float | None) -> str:
    return "none" if figure is None else FIGURES[name][1](figure)


def bound_of(program: Data) -> str:
    """Return the shares of the step's time, largest first, as in ``compute 66%, waiting for gathers 30%``."""
    figures, seconds = program["figures"], Counter[str]()
    for collective in program["collectives"]:
        seconds[f"waiting for {WAITING[collective['kind']]}"] += collective["exposed_seconds"]
    seconds["compute"] = figures["compute_seconds"]
    seconds[f"waiting for {WAITING[SITE]}"] = figures["sites_seconds"]
    whole = figures["step_seconds"]
    parts = [(name, part / whole) for name, part in seconds.most_common() if whole and (part or name == "compute")]
    return ", ".join(f"{name} {share:.0%}" if share >= 0.01 else f"{name} {share:.1%}" for name, share in parts)


def top_of(programs: Sequence[Data], memory_bytes: int) -> list[Data]:
    """Return the tiles at the top of the page. A tile has a name, a text for each program, and a note."""
    first = programs[0]
    figures, device, collectives = first["figures"], first["device"], first["collectives"]
    exposed = sum(collective["exposed_seconds"] > 0 for collective in collectives)
    fits = figures["peak_bytes"] is None or figures["peak_bytes"] <= memory_bytes
    room = f"of {size(memory_bytes)} on {device}" if fits else f"does not fit: {device} has {size(memory_bytes)}"
    at_rest = f", {size(figures['at_rest_bytes'])} between steps" if first["memory"] else ""
    slices = f", {figures['slices']} collectives of slices" if figures["slices"] else ""
    launches = f"{figures['gathers']} gathers, {figures['reductions']} reductions{slices}"
    hidden = f"{exposed} of {len(collectives)} collectives are not hidden behind compute"
    tiles = (
        ("Time of a step", "step_seconds", f"{first['bound']}; MFU {_text('mfu', figures['mfu'])}"),
        ("Peak memory", "peak_bytes", f"{room}{at_rest}"),
        ("Bytes sent", "sent_bytes", f"by this rank, in {launches}"),
        ("Waiting for communication", "exposed_seconds", hidden),
    )
    return [
        {"name": name, "shown": [_text(key, program["figures"][key]) for program in programs], "note": note}
        for name, key, note in tiles
    ]


def differences(programs: Sequence[Data], tables: Sequence[Table]) -> list[Data]:
    """Return a table with the figures of all programs, and their :func:`thunder_zero.tools.diff` with the first one.

    A page with one program has no tables.
    """
    if len(programs) < 2:
        return []
    for table in tables[1:]:
        require_one_module(tables[0].traces, table.traces)
    figures = [program["figures"] for program in programs]
    names = [name for name in FIGURES if name not in OF_SOME or any(values[name] for values in figures)]
    rows = [[FIGURES[name][0], *(_text(name, values[name]) for values in figures)] for name in names]
    step = {"title": "A step", "heads": ["", *(program["name"] for program in programs)], "rows": rows}
    return [step] + [
        {
            "title": f"{programs[0]['name']} {ARROW} {other['name']}, by unit",
            "heads": ["unit", *COLUMNS],
            "rows": [[cell.replace("->", ARROW) for cell in row] for row in alike(difference_of(tables[0], table))],
        }
        for other, table in zip(programs, tables, strict=True)
        if table.traces is not tables[0].traces
    ]


def _bars(rows: Sequence[Row], spans: Iterable[tuple[int, Span]]) -> list[Data]:
    """Return the bars of all lanes, with the line of their row. Adjacent spans of one line become one bar."""
    bars: list[Data] = []
    for line, span in spans:
        row = rows[line]
        lane = (str(span.lane), "") if span.lane in OF_ONE_KIND else (row.kind, str(span.lane))
        bar = {"lane": lane, "line": line, "start": span.start, "end": span.end, "waits": span.waits is not None}
        if bars and bar | {"start": bars[-1]["end"]} == bars[-1] | {"start": span.start, "end": span.end}:
            bars[-1]["end"] = span.end
        elif span.end > span.start:
            bars.append(bar)
    return bars


def _runs(rows: Sequence[Row], units: Mapping[str, int]) -> Iterator[list[int]]:
    """Yield [unit, first line, last line] of successive lines that compute with one unit."""
    computing = (index for index, row in enumerate(rows) if row.kind in COMPUTES and row.start != row.end)
    for (unit, _), run in groupby(computing, key=lambda index: (rows[index].unit, rows[index].phase)):
        lines = list(run)
        yield [units[unit], lines[0], lines[-1]]


def _lines(
    lines: Sequence[Row],
    sizes: Mapping[str, int],
    labels: Sequence[str],
    units: Mapping[str, int],
    collectives: Sequence[Data],
) -> Data:
    params = {path: index for index, path in enumerate(sizes)}
    of_line = {one[end]: index for index, one in enumerate(collectives) for end in ("launch", "wait")}
    origins: dict[str, int] = {"": 0}
    rows = [
        {
            "code": short(row.code),
            "origin": origins.setdefault(row.origin, len(origins)),
            "kind": "" if row.kind in CODES.values() else row.kind,
            "unit": units.get(row.unit, -1),
            "op": -1 if row.op is None else row.op,
            "collective": of_line.get(index, -1),
            "params": [params[path] for path in sorted(row.params, key=lambda path: -sizes[path])],
            "label": labels[index],
            "end": round(row.end or 0.0, DIGITS),
            "took": "" if row.end == row.start else duration((row.end or 0.0) - (row.start or 0.0)),
            "alive": "" if row.alive is None else size(row.alive),
            "highest": row.highest,
            "most": "" if row.highest in (None, row.alive) else size(row.highest or 0),
        }
        for index, row in enumerate(lines)
    ]
    types = [row.types for row in lines]
    return {**_columns(rows), "origins": list(origins), **({"types": types} if any(types) else {})}


def _rows(lines: Iterable[Row]) -> Iterator[int | str]:
    """Yield the numbers of all lines, with phases and the user's lines between them."""
    phase = origin = ""
    for line, row in enumerate(lines):
        if row.phase != phase:
            yield row.phase
        if row.origin not in ("", origin):
            yield f"# {row.origin}"
        phase, origin = row.phase, row.origin or origin
        yield line


def _collectives(table: Table) -> list[Data]:
    rows, timeline, collectives = table.all_rows, table.traces.timeline, []
    ending = {(row.lane, row.wire_end): row for row in rows if row.wire_seconds}
    for launch, row in enumerate(rows):
        if row.op is None or row.sent is None:
            continue
        op = timeline.ops[row.op]
        wait = table.wait_of(row)
        launched, waited, seconds = row.end or 0.0, wait.start or 0.0, row.wire_seconds
        exposed = row.exposed + wait.exposed  # without overlap compute waits at the launch
        why_exposed, earlier = "", ending.get((row.lane, row.wire_start))
        if exposed:
            ahead, queued = max(waited - launched, 0.0), max((row.wire_start or 0.0) - launched, 0.0)
            cause = f"only {duration(ahead)} lie between launch and wait" if ahead else "its wait follows at once"
            others = label(earlier.params, timeline.plan, gradients=earlier.gradients) if earlier else ""
            queue = f", and for {duration(queued)} the wire still carries {others or 'others'}" if queued else ""
            why_exposed = f"it takes {duration(seconds)} on the wire; {cause}{queue}"
        names = label(op.params, timeline.plan, gradients=row.gradients)
        name = f"{op.work} of {op.reads[0]}" if isinstance(op, Compute) else names
        of_wait = table.index_of[wait.ran], name, exposed, why_launch(table, op), why_exposed
        collectives.append(_collective(rows, launch, *of_wait))
    return collectives


def _collective(
    rows: Sequence[Row], launch: int, wait: int, name: str, exposed: float, why: str, why_exposed: str
) -> Data:
    row, seconds = rows[launch], rows[launch].wire_seconds
    hidden = int(100 * max(0.0, 1 - exposed / seconds)) if seconds else 100
    return {
        "kind": row.kind,
        "backward": row.phase.startswith("backward"),
        "unit": row.unit,
        "label": name,
        "sent_bytes": row.sent,
        "launch": launch,
        "wait": wait,
        "wire_seconds": round(seconds, DIGITS),
        "exposed_seconds": round(exposed, DIGITS),
        "why": why,
        "why_exposed": why_exposed,
        "hidden": hidden,
        "words": [size(row.sent or 0), duration(seconds), duration(exposed), f"{hidden}%"],
    }


def _memory(rows: Sequence[Row], memory: Memory, device: Device) -> Data:
    """Return the curve (bytes alive after each line, up to each kind), the tensors, largest first, and the peak."""
    peak, lines = memory.lines.index(memory.peak_line), memory.alive
    lines[peak] = memory.by_kind
    used = {storage.kind for storage in memory.storages}
    kinds = [kind for kind in Holds if kind in used]
    levels, below = [], [memory.reserve] * len(rows)
    for kind in kinds:
        below = [level + alive.get(kind, 0) for level, alive in zip(below, lines, strict=True)]
        levels.append(below)
    largest_first = sorted(memory.storages, key=lambda storage: -storage.nbytes)
    number = {id(storage): index for index, storage in enumerate(largest_first)}
    tensors = [
        {
            "kind": kinds.index(storage.kind),
            "size": size(storage.nbytes),
            "name": (storage.module if storage.kind in (Holds.SAVED, Holds.TEMPORARY) else "") or storage.name,
            "made": storage.line,
        }
        for storage in largest_first
    ]
    tops: dict[tuple[int, ...], int] = {}  # the largest tensors, which are those of many lines
    numbers = (tuple(number[id(storage)] for storage in largest) for largest in memory.largest(LARGEST))
    return {
        "kinds": [str(kind) for kind in kinds],
        "levels": levels,
        "tensors": _columns(tensors),
        "top": [tops.setdefault(largest, len(tops)) for largest in numbers],
        "tops": list(tops),
        "peak": {
            "bytes": memory.peak,
            "size": size(memory.peak),
            "line": peak,
            "by_kind": {str(kind): nbytes for kind, nbytes in memory.by_kind.items()},
            "sizes": [size(nbytes) for nbytes in memory.by_kind.values()],
        },
        "reserve": memory.reserve,
        "capacity": device.memory_bytes,
        "room": f"{device.name} has {size(device.memory_bytes)}",
    }


def _columns(rows: Sequence[Data]) -> Data:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

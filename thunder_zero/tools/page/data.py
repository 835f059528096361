"""The page as data that JSON can hold: what ``--json`` prints, and what ``page.js`` draws.

Lines, bars, collectives and tensors are columns: lists of the same length, one item each. Units, parameters and
origins are named by their positions in lists; seconds are since the step began, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.policy import STAGES
from thunder_zero.tools.forecast.figures import Holds, Memory, Storage, outside_of_the_peak
from thunder_zero.tools.page.program import PageProgram
from thunder_zero.tools.printing.text import place_of

Data = dict[str, Any]
DIGITS = 10  # of seconds: a tenth of a nanosecond


def data_of(program: PageProgram) -> Data:
    """All that the page shows of one program."""
    plan, memory = program.traces.plan, program.memory
    units = list(plan.units)
    return {
        "name": program.name,
        "place": place_of(plan),
        "stage": STAGES[plan.policy.stage].name,
        "world_size": plan.mesh.shard.size,
        "slices": plan.mesh.tensor.size,
        "device": program.estimate.device.name,
        "note": " ".join(filter(None, [program.note, program.no_memory])),
        "figures": figures_of(program),
        "bound": bound_of(program),
        "left_out": [] if memory is None else outside_of_the_peak(memory)[1:],
        "units": units,
        "parameters": [
            {
                "path": path,
                "unit": units.index(one.param.unit),
                "elements": prod(one.param.shape),
                "explained": str(one),
            }
            for path, one in program.explanations.items()
        ],
        "phases": _phases(program),
        "lines": _lines_of(program, units),
        "runs": [[units.index(unit), first, last] for unit, first, last in program.units],
        "lanes": list(program.lanes),
        "bars": _columns(
            [
                {
                    "lane": program.lanes.index(bar.lane),
                    "line": bar.line,
                    "start": round(bar.start, DIGITS),
                    "end": round(bar.end, DIGITS),
                    "waits": int(bar.waits),
                }
                for bar in program.bars
            ]
        ),
        "collectives": [
            {**asdict(one), "params": len(one.params), "hidden_share": one.hidden_share} for one in program.collectives
        ],
        "memory": None if memory is None else _memory_of(program, memory),
    }


def figures_of(program: PageProgram) -> dict[str, float | None]:
    """The figures of a step, by name: seconds and bytes of ``estimate`` and ``memory``, counted bytes and launches."""
    memory, found = program.memory, program.collectives
    return {
        "step_seconds": program.estimate.seconds,
        "compute_seconds": program.estimate.compute_seconds,
        "exposed_seconds": program.estimate.exposed_seconds,
        "peak_bytes": memory.peak if memory else None,
        "at_rest_bytes": memory.at_rest if memory else None,
        "optimizer_step_bytes": memory.optimizer_step if memory else None,
        "sent_bytes": program.sent_bytes,
        "gathers": sum(one.kind == "gather" for one in found),
        "reductions": sum(one.kind == "reduce" for one in found),
        "slices": sum(one.kind == TENSOR for one in found),
        "mfu": program.estimate.mfu,
    }


def text_of(name: str, value: float | None) -> str:
    """A figure as people read it."""
    if value is None:
        return "none"
    if name.endswith("_seconds"):
        return duration(value)
    if name.endswith("_bytes"):
        return size(int(value))
    return f"{value:.1%}" if name == "mfu" else f"{value:,}"


def top_of(programs: Sequence[PageProgram]) -> list[Data]:
    """The tiles at the top: a name, the figure of each program as text, and a note on the first."""
    first, figures = programs[0], [figures_of(program) for program in programs]
    exposed = sum(one.exposed_seconds > 0 for one in first.collectives)
    held = figures[0]
    rests = "" if first.memory is None else f", {text_of('at_rest_bytes', held['at_rest_bytes'])} between steps"
    of_slices = f", {held['slices']} collectives of slices" if held["slices"] else ""
    notes = {
        "step_seconds": f"{bound_of(first)}; MFU {text_of('mfu', held['mfu'])}",
        "peak_bytes": f"{_room_on(first)}{rests}",
        "sent_bytes": f"by this rank, in {held['gathers']} gathers, {held['reductions']} reductions{of_slices}",
        "exposed_seconds": f"{exposed} of {len(first.collectives)} collectives are not hidden behind compute",
    }
    names = ("Time of a step", "Peak memory", "Bytes sent", "Waiting for communication")
    return [
        {"name": name, "shown": [text_of(key, one[key]) for one in figures], "note": note}
        for name, (key, note) in zip(names, notes.items(), strict=True)
    ]


def _room_on(program: PageProgram) -> str:
    """What the device has for a peak."""
    device, memory = program.estimate.device, program.memory
    if memory is not None and memory.peak > device.memory_bytes:
        return f"does not fit: {device.name} has {size(device.memory_bytes)}"
    return f"of {size(device.memory_bytes)} on {device.name}"


def bound_of(program: PageProgram) -> str:
    """What the step's time is spent on, the most first: ``compute 66%, waiting for gathers 30%``."""
    parts = {"compute": program.estimate.compute_seconds}
    waiting = {"gather": "gathers", "reduce": "reductions", TENSOR: "tensor parallelism"}
    for kind, words in ((kind, f"waiting for {name}") for kind, name in waiting.items()):
        if waits := sum(one.exposed_seconds for one in program.collectives if one.kind == kind):
            parts[words] = waits
    most = sorted(parts, key=lambda name: -parts[name])
    return (
        ", ".join(f"{name} {_percent(parts[name] / program.estimate.seconds)}" for name in most)
        if program.estimate.seconds
        else ""
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _phases(program: PageProgram) -> list[Data]:
    found: dict[str, Data] = {}
    for at, line in enumerate(program.lines):
        one = found.setdefault(line.phase, {"name": line.phase, "first": at, "start": line.start})
        one |= {"last": at, "end": line.end}
    return list(found.values())


def _lines_of(program: PageProgram, units: Sequence[str]) -> Data:
    plan, memory = program.traces.plan, program.memory
    params = {path: at for at, path in enumerate(program.explanations)}
    origins: dict[str, int] = {"": 0}
    rows = []
    for line in program.lines:
        row, at = line.row, None if line.memory is None or memory is None else memory.lines[line.memory]
        origin = origins.setdefault(row.line.origin if row else "", len(origins))
        rows.append(
            {
                "phase": line.phase,
                "code": line.code,
                "origin": origin,
                "kind": (TENSOR if row.does == TENSOR else row.kind) if row else None,
                "unit": units.index(line.unit) if line.unit in units else -1,
                "ops": line.ops,
                "params": [params[path] for path in row.params] if row else [],
                "label": row.label(plan) if row else "",
                "sent": row.sent if row else None,
                "start": round(line.start, DIGITS),
                "end": round(line.end, DIGITS),
                "alive": at.total if at else None,
                "highest": at.highest if at else None,
            }
        )
    return {**_columns(rows), "origins": list(origins)}


def _memory_of(program: PageProgram, memory: Memory) -> Data:
    """The curve as changes of bytes by kind, the tensors with the lines between which they live, and the peak."""
    places = _places(program, memory)
    kinds = [kind for kind in Holds if any(one.kind is kind for one in memory.storages)]
    now: dict[Holds, int] = {}
    changes: list[list[int]] = []
    for number, line in zip(places, memory.lines, strict=True):
        alive = dict(line.alive)
        for kind in kinds:
            if step := alive.get(kind, 0) - now.get(kind, 0):
                changes.append([number, kinds.index(kind), step])
        now = alive
    tensors = {id(one): at for at, one in enumerate(memory.storages)}
    return {
        "kinds": [str(kind) for kind in kinds],
        "changes": changes,
        "tensors": _columns([_tensor(one, kinds, places) for one in memory.storages]),
        "peak": {
            "bytes": memory.peak,
            "line": places[memory.lines.index(memory.peak_line)],
            "by_kind": {str(kind): nbytes for kind, nbytes in memory.by_kind.items()},
            "tensors": [tensors[id(one)] for one in memory.at_peak],
        },
        "reserve": memory.reserve,
        "capacity": program.estimate.device.memory_bytes,
    }


def _places(program: PageProgram, memory: Memory) -> list[int]:
    """The line of the page of each line of a forecast of memory."""
    found: dict[int, int] = {}
    for number, line in enumerate(program.lines):
        if line.memory is not None:
            found.setdefault(line.memory, number)
    return [found[at] for at in range(len(memory.lines))]


def _tensor(one: Storage, kinds: Sequence[Holds], places: Sequence[int]) -> Data:
    made = places[one.line] if one.line >= 0 else -1
    freed = None if one.freed is None else places[one.freed]
    where = one.name if one.module == "" or one.kind not in (Holds.SAVED, Holds.TEMPORARY) else one.module
    return {"kind": kinds.index(one.kind), "bytes": one.nbytes, "name": where, "made": made, "freed": freed}


def _columns(rows: Sequence[Data]) -> Data:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

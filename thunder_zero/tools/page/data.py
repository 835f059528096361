"""Turns a page into JSON data, which ``--json`` prints and ``page.js`` draws.

Lines, bars and tensors are tables with a list for each column. Units, parameters and origins are list indices. Times
are seconds since the step began. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.policy import STAGES
from thunder_zero.tools.forecast.figures import Holds, Memory, Storage, outside_of_the_peak
from thunder_zero.tools.page.program import Data, PageProgram
from thunder_zero.tools.printing.text import place_of
from thunder_zero.tools.printing.words import short
from thunder_zero.tools.table.rows import CODES, label_of

DIGITS = 10  # seconds are rounded to a tenth of a nanosecond


def data_of(program: PageProgram) -> Data:
    """Return the data of one program."""
    plan, memory = program.table.traces.plan, program.table.memory
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
                "unit": units.index(explanation.param.unit),
                "elements": prod(explanation.param.shape),
                "explained": str(explanation),
            }
            for path, explanation in program.explanations.items()
        ],
        "phases": _phases(program),
        "lines": _lines_of(program, units),
        "runs": [[units.index(unit), first, last] for unit, first, last in program.units],
        "lanes": list(program.lanes),
        "bars": _columns(
            [
                bar
                | {"lane": program.lanes.index(bar["lane"]), "waits": int(bar["waits"])}
                | {moment: round(bar[moment], DIGITS) for moment in ("start", "end")}
                for bar in program.bars
            ]
        ),
        "collectives": list(program.collectives),
        "memory": None if memory is None else _memory_of(program, memory),
    }


def figures_of(program: PageProgram) -> dict[str, float | None]:
    """Return named figures of a step, from ``estimate`` and ``memory``, and counts of bytes and launches."""
    memory, collectives = program.table.memory, program.collectives
    return {
        "step_seconds": program.estimate.seconds,
        "compute_seconds": program.estimate.compute_seconds,
        "exposed_seconds": program.estimate.exposed_seconds,
        "peak_bytes": memory.peak if memory else None,
        "at_rest_bytes": memory.at_rest if memory else None,
        "optimizer_step_bytes": memory.optimizer_step if memory else None,
        "sent_bytes": sum(row.sent or 0 for row in program.table.all),
        "gathers": sum(collective["kind"] == "gather" for collective in collectives),
        "reductions": sum(collective["kind"] == "reduce" for collective in collectives),
        "slices": sum(collective["kind"] == TENSOR for collective in collectives),
        "mfu": program.estimate.mfu,
    }


def text_of(name: str, value: float | None) -> str:
    """Return a figure as text, with the unit of measure."""
    if value is None:
        return "none"
    if name.endswith("_seconds"):
        return duration(value)
    if name.endswith("_bytes"):
        return size(int(value))
    return f"{value:.1%}" if name == "mfu" else f"{value:,}"


def top_of(programs: Sequence[PageProgram]) -> list[Data]:
    """Return the tiles at the top of the page. A tile has a name, a text for each program, and a note."""
    first, figures = programs[0], [figures_of(program) for program in programs]
    exposed = sum(collective["exposed_seconds"] > 0 for collective in first.collectives)
    shown = figures[0]
    at_rest = (
        "" if first.table.memory is None else f", {text_of('at_rest_bytes', shown['at_rest_bytes'])} between steps"
    )
    slices = f", {shown['slices']} collectives of slices" if shown["slices"] else ""
    notes = {
        "step_seconds": f"{bound_of(first)}; MFU {text_of('mfu', shown['mfu'])}",
        "peak_bytes": f"{_memory_note(first)}{at_rest}",
        "sent_bytes": f"by this rank, in {shown['gathers']} gathers, {shown['reductions']} reductions{slices}",
        "exposed_seconds": f"{exposed} of {len(first.collectives)} collectives are not hidden behind compute",
    }
    names = ("Time of a step", "Peak memory", "Bytes sent", "Waiting for communication")
    return [
        {"name": name, "shown": [text_of(key, program_figures[key]) for program_figures in figures], "note": note}
        for name, (key, note) in zip(names, notes.items(), strict=True)
    ]


def _memory_note(program: PageProgram) -> str:
    device, memory = program.estimate.device, program.table.memory
    if memory is not None and memory.peak > device.memory_bytes:
        return f"does not fit: {device.name} has {size(device.memory_bytes)}"
    return f"of {size(device.memory_bytes)} on {device.name}"


def bound_of(program: PageProgram) -> str:
    """Return the shares of the step's time, largest first, as in ``compute 66%, waiting for gathers 30%``."""
    parts = {"compute": program.estimate.compute_seconds}
    waiting = {"gather": "gathers", "reduce": "reductions", TENSOR: "tensor parallelism"}
    for kind, name in waiting.items():
        exposed = [collective["exposed_seconds"] for collective in program.collectives if collective["kind"] == kind]
        if sum(exposed):
            parts[f"waiting for {name}"] = sum(exposed)
    ordered = sorted(parts, key=lambda name: -parts[name])
    return (
        ", ".join(f"{name} {_percent(parts[name] / program.estimate.seconds)}" for name in ordered)
        if program.estimate.seconds
        else ""
    )


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _phases(program: PageProgram) -> list[Data]:
    phases: dict[str, Data] = {}
    for index, row in enumerate(program.table.all):
        phase = phases.setdefault(row.phase, {"name": row.phase, "first": index, "start": row.start})
        phase |= {"last": index, "end": row.end}
    return list(phases.values())


def _lines_of(program: PageProgram, units: Sequence[str]) -> Data:
    plan = program.table.traces.plan
    params = {path: index for index, path in enumerate(program.explanations)}
    origins: dict[str, int] = {"": 0}
    rows = [
        {
            "phase": row.phase,
            "code": short(row.code),
            "origin": origins.setdefault(row.origin, len(origins)),
            "kind": row.kind if row.kind and row.kind not in CODES.values() else None,
            "unit": units.index(row.unit) if row.unit in units else -1,
            "ops": [] if row.op is None else [row.op],
            "params": [params[path] for path in row.params],
            "label": label_of(row, plan),
            "sent": row.sent,
            "start": round(row.start or 0.0, DIGITS),
            "end": round(row.end or 0.0, DIGITS),
            "alive": row.alive,
            "highest": row.highest,
        }
        for row in program.table.all
    ]
    return {**_columns(rows), "origins": list(origins)}


def _memory_of(program: PageProgram, memory: Memory) -> Data:
    """Return the curve (changes of bytes, keyed by kind), the tensors with their lines, and the peak."""
    line_of = {(row.phase, row.position): number for number, row in enumerate(program.table.all)}
    places = [line_of[line.phase, line.position] for line in memory.lines]
    kinds = [kind for kind in Holds if any(storage.kind is kind for storage in memory.storages)]
    previous: dict[Holds, int] = {}
    changes: list[list[int]] = []
    for number, line in zip(places, memory.lines, strict=True):
        alive = dict(line.alive)
        for kind in kinds:
            if change := alive.get(kind, 0) - previous.get(kind, 0):
                changes.append([number, kinds.index(kind), change])
        previous = alive
    tensors = {id(storage): index for index, storage in enumerate(memory.storages)}
    return {
        "kinds": [str(kind) for kind in kinds],
        "changes": changes,
        "tensors": _columns([_tensor(storage, kinds, places) for storage in memory.storages]),
        "peak": {
            "bytes": memory.peak,
            "line": places[memory.lines.index(memory.peak_line)],
            "by_kind": {str(kind): nbytes for kind, nbytes in memory.by_kind.items()},
            "tensors": [tensors[id(storage)] for storage in memory.at_peak],
        },
        "reserve": memory.reserve,
        "capacity": program.estimate.device.memory_bytes,
    }


def _tensor(storage: Storage, kinds: Sequence[Holds], places: Sequence[int]) -> Data:
    first = places[storage.line] if storage.line >= 0 else -1
    freed = None if storage.freed is None else places[storage.freed]
    has_module = storage.module != "" and storage.kind in (Holds.SAVED, Holds.TEMPORARY)
    name = storage.module if has_module else storage.name
    return {"kind": kinds.index(storage.kind), "bytes": storage.nbytes, "name": name, "made": first, "freed": freed}


def _columns(rows: Sequence[Data]) -> Data:
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

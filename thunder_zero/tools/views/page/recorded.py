"""Turns the picture of anybody's step, which ``check_step`` recorded, into the data of a page.

In: a verdict with its picture, and a device. Out: rows of the tools' table, their spans, and from these the data::

    _allgather_base_(t47, ..)       gather   bytes on a ring       a span of a wire, which starts when the host may
    split_with_sizes_copy(t47, ..)  compute  reads t47             a wait for the wire, a span of compute
    mm(t46, t32)                    compute  FLOPs, bytes          a span of compute
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from thunder_zero.plan.amounts import duration, size
from thunder_zero.plan.mesh import TENSOR, Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.spmd.picture import DrawnLine, StepPicture
from thunder_zero.spmd.verdict import Verdict
from thunder_zero.tools.devices.device import Cost, Device, Lane
from thunder_zero.tools.forecast.figures import Holds, Memory, Storage
from thunder_zero.tools.table.rows import OPTIMIZER_STEP, Row
from thunder_zero.tools.table.table import with_times
from thunder_zero.tools.time.lanes import Lanes, Span
from thunder_zero.tools.views.page import data as page

BLOCK = 512  # bytes: to their multiples CUDA's caching allocator rounds
NOTE = (
    "Operators are those of a CPU. Times are a forecast: the host runs ahead, a gather starts when the one before it "
    "was read, and compute waits for a collective where its result is first read."
)


def data_of_step(verdict: Verdict, picture: StepPicture, device: Device) -> page.Data:
    """Return the data of one program: the recorded step."""
    lines, reads = picture.lines, _first_reads(picture.lines)
    rows, memory = _with_memory(list(_rows_of(picture)), picture)
    wires = {axis: Lane.SHARD if axis in picture.data else Lane.TENSOR for axis in picture.axes}
    wires |= dict.fromkeys(picture.data[:-1], Lane.REPLICATE)
    spans = [(span.op, span) for span in _simulated(picture, device, wires, reads)]
    rows = list(with_times(rows, spans, [Cost(flops=line.flops) for line in lines]))
    units = dict.fromkeys(["", *(row.unit for row in rows)])
    seconds, exposed = rows[-1].end or 0.0, sum(span.seconds for _, span in spans if span.waits)
    launches, flops = Counter(row.kind for row in rows if row.sent is not None), sum(line.flops for line in lines)
    dtype = next((line.dtype for line in lines if line.flops), "")
    gradients = {item.path: f"{item.path}: gradient {item}" for item in verdict.gradients}
    slack = size(sum(-storage.nbytes % BLOCK for storage in memory.at_peak))
    sizes = {path: numel for path, (_, numel) in picture.parameters.items()}
    data = {
        "name": "the step",
        "place": f"rank 0 of {', '.join(f'{axis}={ranks}' for axis, ranks in picture.axes.items())}",
        "stage": "",
        "note": f"{NOTE} A GPU's allocator rounds tensors up, by {slack} at the peak, and its fragments are extra.",
        "figures": {
            "step_seconds": seconds,
            "compute_seconds": seconds - exposed,
            "exposed_seconds": exposed,
            "sites_seconds": 0.0,
            "peak_bytes": memory.peak,
            "at_rest_bytes": memory.at_rest,
            "optimizer_step_bytes": memory.optimizer_step,
            "sent_bytes": sum(line.sent for line in lines),
            "gathers": launches["gather"],
            "reductions": launches["reduce"],
            "slices": launches[TENSOR],
            "mfu": flops / device.peak(dtype) / seconds if flops else 0.0,
        },
        "parameters": [{"path": path, "explained": gradients.get(path, path)} for path in sizes],
        **page.drawn(
            rows, spans, units, sizes, list(map(_label, rows)), list(_collectives(rows, reads)), memory, device
        ),
    }
    return data | {"bound": page.bound_of(data)}


# rows


def _rows_of(picture: StepPicture) -> Iterator[Row]:
    paths = {storage: path for held in (picture.gradients, picture.parameters) for path, (storage, _) in held.items()}
    sources: dict[int, tuple[int, ...]] = {}  # what the last line that wrote a storage has read
    for index, (line, phase) in enumerate(zip(picture.lines, _phases(picture.lines), strict=True)):
        row = Row(phase, index, line.code, line.where, index, "compute", unit=line.unit, types=line.types)
        if line.collective:
            near = [*line.writes, *line.reads, *(item for storage in line.reads for item in sources.get(storage, ()))]
            params = tuple(dict.fromkeys(paths[storage] for storage in near if storage in paths))
            kind = "gather" if line.collective == "all_gather" else "reduce"
            kind = kind if {*line.axes} & {*picture.data} else TENSOR
            axes = " and ".join(line.axes)
            row = replace(row, kind=kind, params=params, gradients=kind == "reduce", over=axes, sent=line.sent)
        else:
            sources.update(dict.fromkeys(line.writes, line.reads))
        yield replace(row, flops=line.flops)


def _phases(lines: Sequence[DrawnLine]) -> Iterator[str]:
    """Yield the phase of each line. What follows the last backward is the optimizer's step."""
    last = max((index for index, line in enumerate(lines) if line.backward), default=len(lines))
    number, was_backward = 1, False
    for index, line in enumerate(lines):
        number += was_backward and not line.backward
        was_backward = line.backward
        name = f"{'backward' if line.backward else 'forward'}{f' {number}' if number > 1 else ''}"
        yield name if index <= last else OPTIMIZER_STEP


def _label(row: Row) -> str:
    return f"{row.params[0]}, {len(row.params) - 1} more" if row.params[2:] else ", ".join(row.params)


def _with_memory(rows: list[Row], picture: StepPicture) -> tuple[list[Row], Memory]:
    """Return rows with the bytes alive, and the storages of the step. One storage may be allocated several times."""
    kinds, held = _kinds(picture, rows), (picture.parameters, picture.gradients, picture.buffers)
    names = {storage: path for paths in held for path, (storage, _) in paths.items()}
    living: dict[int, int] = {}  # indices of ``storages``, by number
    storages: list[Storage] = []
    alive, highest, peak, at_peak = 0, 0, 0, list[int]()
    allocated: defaultdict[int, Counter[str]] = defaultdict(Counter)
    freed: defaultdict[int, Counter[str]] = defaultdict(Counter)
    most: dict[int, int] = {}
    for index, number, nbytes in picture.sizes:
        if (old := living.pop(number, None)) is not None:
            storages[old] = replace(storages[old], freed=index)
            freed[index][storages[old].kind] += storages[old].nbytes
            alive -= storages[old].nbytes
        if nbytes:
            living[number] = len(storages)
            storages.append(Storage(kinds[number], nbytes, names.get(number, f"t{number}"), line=index))
            allocated[index][kinds[number]] += nbytes
            alive += nbytes
        most[index] = max(most.get(index, 0), alive)
        if alive > highest and rows[index].phase != OPTIMIZER_STEP:
            highest, peak, at_peak = alive, max(index, 0), [*living.values()]
    after = sum(allocated[-1].values())
    for index, row in enumerate(rows):
        before, after = after, after + sum(allocated[index].values()) - sum(freed[index].values())
        top = max(before, after, most.get(index, 0))
        row = replace(row, allocated=allocated[index], freed=freed[index], alive=after, highest=top)
        rows[index] = replace(row, is_peak=index == peak)
    largest = sorted((storages[index] for index in at_peak), key=lambda storage: -storage.nbytes)
    plan = Plan(Policy(), Mesh.of(prod(picture.axes.values())), ())
    return rows, Memory(tuple(rows), tuple(storages), plan, tuple(largest), 0, ())


def _kinds(picture: StepPicture, rows: Sequence[Row]) -> dict[int, Holds]:
    """Return what each storage holds, as far as the lines tell."""
    lines, kinds = picture.lines, {number: Holds.TEMPORARY for _, number, _ in picture.sizes}
    made: dict[int, str] = {}  # the phase that wrote a storage first
    for line, row in zip(lines, rows, strict=True):
        kinds |= {
            item: Holds.SAVED for item in line.reads if line.backward and made.get(item, "").startswith("forward")
        }
        kinds |= {
            item: Holds.OPTIMIZER
            for item in line.writes
            if row.phase == made.setdefault(item, row.phase) == OPTIMIZER_STEP
        }
    launched = [(line, line.collective) for line in lines if line.collective]
    sent = {item for line, kind in launched for item in (*line.reads, *line.writes)}
    gathered = {item for line, kind in launched if kind == "all_gather" for item in line.writes}
    for line in lines:
        if not line.collective and gathered & {*line.reads}:
            kinds |= dict.fromkeys(line.writes, Holds.GATHERED)
        elif not line.collective and line.backward and (sent - gathered) & {*line.writes}:
            kinds |= dict.fromkeys(line.reads, Holds.FULL_GRADIENT)
    kinds |= dict.fromkeys(sent, Holds.IN_FLIGHT)
    kinds |= {number: Holds.INPUT for index, number, _ in picture.sizes if index < 0}
    for held, kind in (
        (picture.gradients, Holds.REDUCED_GRADIENT),
        (picture.buffers, Holds.BUFFER),
        (picture.parameters, Holds.PARAMETER),
    ):
        kinds |= {storage: kind for storage, _ in held.values()}
    return kinds


# times


def _first_reads(lines: Sequence[DrawnLine]) -> dict[int, int]:
    """Return the line that first reads the result of each collective; the last line if none does."""
    launched: dict[int, int] = {}
    result = {index: len(lines) - 1 for index, line in enumerate(lines) if line.collective}
    for index, line in enumerate(lines):
        for storage in line.reads:
            if storage in launched and index not in result:
                result[launched.pop(storage)] = index
        if index in result:
            launched |= dict.fromkeys(line.writes, index)
    return result


def _simulated(
    picture: StepPicture, device: Device, wires: Mapping[str, Lane], reads: Mapping[int, int]
) -> tuple[Span, ...]:
    lanes, last = Lanes(), dict[Lane, int]()  # the first read of the last gather on each wire
    launches, waits = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for launch, read in reads.items():
        lane = _lane(picture.lines[launch], wires)
        runs_ahead = picture.lines[launch].collective == "all_gather" and lane is not Lane.TENSOR
        launches[min(launch, last.get(lane, 0)) if runs_ahead else launch].append(launch)
        waits[read].append(launch)
        last |= {lane: read} if runs_ahead else {}
    for index, line in enumerate(picture.lines):
        for launch in waits[index]:
            lanes.wait(index, str(launch))
        for launch in launches[index]:
            lanes.launch(launch, str(launch), _cost(picture.lines[launch], picture.axes, device, wires))
        if not line.collective:
            work = "matmul" if line.flops else "pointwise"
            lanes.compute(index, device.seconds(line.flops, line.dtype, line.traffic_bytes, work), always=True)
    return lanes.spans()


def _lane(line: DrawnLine, wires: Mapping[str, Lane]) -> Lane:
    return min((wires[axis] for axis in line.axes if axis in wires), key=[*Lane].index, default=Lane.SHARD)


def _cost(line: DrawnLine, axes: Mapping[str, int], device: Device, wires: Mapping[str, Lane]) -> Cost:
    if not line.sent:
        return Cost()
    names = list(axes)
    inner = max((names.index(axis) for axis in line.axes if axis in axes), default=len(names) - 1)
    kind = {"all_gather": "gather", "all_reduce": "all_reduce"}.get(line.collective, "scatter")
    steps, stride = (1 + (kind == "all_reduce")) * (line.ranks - 1), prod([*axes.values()][inner + 1 :])
    return replace(device.collective(kind, line.ranks, stride, line.sent, steps, 1), lane=_lane(line, wires))


def _collectives(rows: Sequence[Row], reads: Mapping[int, int]) -> Iterator[page.Data]:
    for launch, wait in reads.items():
        row, exposed = rows[launch], rows[wait].exposed if rows[wait].end == rows[launch].wire_end else 0.0
        seconds = row.wire_seconds
        hidden = max(0.0, 1 - exposed / seconds) if seconds else 1.0
        yield {
            "op": launch,
            "kind": row.kind,
            "backward": row.phase.startswith("backward"),
            "unit": row.unit,
            "label": _label(row) or row.code.partition(":")[0],
            "sent_bytes": row.sent,
            "launch": launch,
            "wait": wait,
            "wire_seconds": seconds,
            "exposed_seconds": exposed,
            "why": row.origin,
            "why_exposed": f"it takes {duration(seconds)} on the wire of {row.over}" if exposed else "",
            "hidden": hidden,
            "words": [size(row.sent or 0), duration(seconds), duration(exposed), f"{int(100 * hidden)}%"],
        }

"""Computes the rows, the memory and the times of anybody's step, which ``check_step`` recorded.

::

    _allgather_base_(t47, ..)       gather   bytes on a ring       a span of a wire, which starts when the host may
    split_with_sizes_copy(t47, ..)  compute  reads t47             a wait for the wire, a span of compute
    mm(t46, t32)                    compute  FLOPs, bytes          a span of compute
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from thunder_zero.plan.mesh import TENSOR, Mesh
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import Policy
from thunder_zero.schedule.ops import Compute, Exchange, Op, Work
from thunder_zero.schedule.timeline import NO_TRAFFIC, Timeline
from thunder_zero.spmd.picture import DrawnLine, StepPicture
from thunder_zero.tools.devices.device import Cost, Device, Lane
from thunder_zero.tools.forecast.figures import Holds, Memory, Storage
from thunder_zero.tools.forecast.memory import with_bytes
from thunder_zero.tools.table.rows import OPTIMIZER_STEP, Row
from thunder_zero.tools.table.table import with_times
from thunder_zero.tools.time.estimate import Estimate
from thunder_zero.tools.time.lanes import Span


def recorded(picture: StepPicture, device: Device) -> tuple[Memory, Estimate, tuple[tuple[int, Span], ...]]:
    """Return the memory of a step, whose lines are its rows, and its times, with (index of the row, span) pairs."""
    plan = Plan(Policy(), Mesh.of(prod(picture.axes.values())), ())
    memory, (time, lines) = _memory(list(_rows_of(picture)), picture, plan), _time(picture, device, plan)
    spans = tuple((lines[span.op], span) for span in time.spans)
    return replace(memory, lines=tuple(with_times(memory.lines, spans, time.costs))), time, spans


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


def _memory(rows: Sequence[Row], picture: StepPicture, plan: Plan) -> Memory:
    """Return the storages of a step, and its rows with their bytes. One storage may be allocated several times."""
    kinds, held = _kinds(picture, rows), (picture.parameters, picture.gradients, picture.buffers)
    names = {storage: path for paths in held for path, (storage, _) in paths.items()}
    living: dict[int, int] = {}  # indices of ``storages``, by number
    storages: list[Storage] = []
    alive, peak, at_peak = 0, 0, list[int]()
    highest: dict[int, int] = {}
    for index, number, nbytes in sorted(picture.sizes, key=lambda change: change[0]):  # a first read tells of -1
        highest.setdefault(index, alive)
        if (old := living.pop(number, None)) is not None:
            storages[old] = replace(storages[old], freed=index)
            alive -= storages[old].nbytes
        if nbytes:
            living[number] = len(storages)
            storages.append(Storage(kinds[number], nbytes, names.get(number, f"t{number}"), line=index))
            alive += nbytes
        highest[index] = max(highest[index], alive)
        if alive > peak and rows[index].phase != OPTIMIZER_STEP:
            peak, at_peak = alive, [*living.values()]
    largest = sorted((storages[index] for index in at_peak), key=lambda storage: -storage.nbytes)
    return Memory(tuple(with_bytes(rows, storages, highest)), tuple(storages), plan, tuple(largest), 0, ())


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


def first_reads(lines: Sequence[DrawnLine]) -> dict[int, int]:
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


def _time(picture: StepPicture, device: Device, plan: Plan) -> tuple[Estimate, tuple[int, ...]]:
    """Return the times of a step, and the line of each of its operations. Gathers of parameters run ahead."""
    lines, last = picture.lines, dict[Lane, int]()  # the first read of the last gather on each wire
    wires = {axis: Lane.SHARD if axis in picture.data else Lane.TENSOR for axis in picture.axes}
    wires |= dict.fromkeys(picture.data[:-1], Lane.REPLICATE)
    launches, waits = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for launch, read in first_reads(lines).items():
        lane = _lane(lines[launch], wires)
        runs_ahead = lines[launch].collective == "all_gather" and lane is not Lane.TENSOR
        launches[min(launch, last.get(lane, 0)) if runs_ahead else launch].append(launch)
        waits[read].append(launch)
        last |= {lane: read} if runs_ahead else {}
    ran: list[tuple[int, Op, Cost]] = []
    for index, line in enumerate(lines):
        ran += [(index, Compute((str(launch),), (), work=Work.AWAIT), Cost()) for launch in waits[index]]
        for launch in launches[index]:
            op = Compute((), (str(launch),), work=Exchange(lines[launch].collective, NO_TRAFFIC))
            ran.append((launch, op, _cost(lines[launch], picture.axes, device, wires)))
        if not line.collective:
            work = "matmul" if line.flops else "pointwise"
            seconds = device.seconds(line.flops, line.dtype, line.traffic_bytes, work)
            ran.append((index, Compute((), ()), Cost(line.flops, line.traffic_bytes, seconds=seconds)))
    indices, ops, costs = zip(*ran, strict=True)
    model_seconds = sum(line.flops / device.peak(line.dtype) for line in lines if line.flops)
    return Estimate(Timeline(ops, {}, plan), device, costs, model_seconds), indices


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

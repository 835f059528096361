"""Explains timelines, and each line of a trace from its timeline: kind, parameters, bytes.

::

    gather   fut0 <- t_w                           h.0.w                       lines of a timeline
    wait     w <- fut0                             h.0.w

    ft1 = zero_all_gather(t_w, 'h.0.w')            gather  h.0.w          1.50 KiB   2.00 KiB      lines of a trace
    t2 = zero_wait(ft1)                            wait    h.0.w                     2.00 KiB
    t3 = torch.nn.functional.linear(x, t2, None)   compute h.0.w                     2.00 KiB
    del t2                                         free    h.0.w                          0 B

Lines are plain text. This module does not use Thunder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import (
    Compute,
    Defer,
    Free,
    Gather,
    Launch,
    Op,
    Reduce,
    Return,
    Wait,
    ends,
    starts_collective,
)
from thunder_zero.schedule.timeline import Timeline

BORDER = "-- backward --"
VALUES_WIDTH = 32  # a fixed width, so that two timelines can be compared line by line


def format_timeline(timeline: Timeline, *, numbered: bool = False) -> str:
    """Return a line for each operation, in order, with its kind, writes, reads and parameters.

    FREEs of other values than gathered parameters are left out. Lines of recomputed operations end with "again". A
    border separates the phases. Lines may be long. A numbered line begins with "op 22", as errors name it.
    """
    lines: list[str] = []
    for index, op in enumerate(timeline.ops):
        if index == timeline.backward_start:
            lines.append(BORDER)
        if op.params or not isinstance(op, Free):
            lines.append(f"op {index:<4} " * numbered + _line(op))
    return "\n".join(lines)


def _line(op: Op) -> str:
    reads = ", ".join(op.reads)
    values = reads if isinstance(op, Free) else f"{', '.join(op.writes)} <- {reads}".strip()
    return f"{op.kind:<8} {values:<{VALUES_WIDTH}}  {', '.join(op.params)}{'  again' if op.repeated else ''}".rstrip()


PHASES = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a trace."""

    code: str  # its Python statement
    position: int  # the line's position in its phase's trace, as in ``Traces.lines``
    origin: str = ""  # the corresponding line of the user's program; "" if unknown
    alive: int | None = None  # forecast bytes of all tensors alive after the line; None without a forecast
    # the most bytes alive while the line runs; None for all lines except the line of the step's peak
    peak: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line and its meaning."""

    line: SourceLine  # the line
    # the kind of the line's operation. None without an operation: unpacking, encoding, or the ``del`` of an activation.
    kind: str | None
    # the kind as text, "encode", "decode", or "tensor" for torch's tensor parallelism. "" outside the schedule.
    does: str
    params: tuple[str, ...]  # paths of the line's parameters, including parameters whose gradients the line computes
    gradients: bool  # True if the line handles gradients of the parameters
    sent: int | None  # bytes that this rank sends; None if the line launches no collective
    deferred: int  # bytes of full gradients that the line keeps for the reduction in a later backward
    gathered: int  # bytes of gathered parameters alive after the line
    form: str = ""  # the encoding of a collective's messages, such as "int8/128"; "" without an encoding

    def label(self, plan: Plan) -> str:
        """Return a short name of the parameters, and the encoding of the messages."""
        names = label(self.params, plan, gradients=self.gradients)
        return f"{names} as {self.form}" if self.form else names


CODES = {"gather": "encode", "reduce": "encode", "wait": "decode"}  # labels of encoding lines

ONLY: Mapping[str, Callable[[Row], bool]] = {
    "parameters": lambda row: bool(row.params),
    "communication": lambda row: row.does in (*CODES, TENSOR, *CODES.values()),
}


@dataclass(frozen=True, slots=True)
class Gap:
    """A placeholder for lines that are not shown."""

    lines: int


def rows(
    lines: Iterable[SourceLine], timeline: Timeline, positions: Sequence[Sequence[int]], *, backward: bool
) -> tuple[Row, ...]:
    """Return the rows of one phase: the lines with their meanings. ``positions`` are :attr:`Traces.lines`."""
    alive, read, made = gathered_bytes(timeline), _parameters_in(timeline), _gradients(timeline)
    index_of = {
        position: index
        for index, (op, of_op) in enumerate(zip(timeline.ops, positions, strict=True))
        for position in of_op
        if op.backward is backward and (op.params or not isinstance(op, Free))
    }
    gathered = alive[timeline.backward_start - 1] if backward else 0
    result: list[Row] = []
    for line in lines:
        index = index_of.pop(line.position, None)
        if index is None:
            result.append(Row(line, None, "", (), False, None, 0, gathered))
        elif line.position != positions[index][0]:
            result.append(_code_row(line, timeline.ops[index], timeline, gathered))
        else:
            gathered = alive[index]
            op = timeline.ops[index]
            reads = op.returned if isinstance(op, Return) else op.reads
            paths = _lookup(reads, read) or _lookup(op.writes, made) if isinstance(op, Compute | Return) else op.params
            is_made = isinstance(op, Compute) and not _lookup(op.reads, read) and bool(paths)
            result.append(_row(line, op, timeline, paths, gathered, gradients=is_made))
    if index_of:
        raise ValueError(f"the timeline has operations at {sorted(index_of)}, but the trace has no lines there")
    return tuple(result)


def _row(
    line: SourceLine, op: Op, timeline: Timeline, paths: tuple[str, ...], gathered: int, *, gradients: bool
) -> Row:
    """Return the row of the line that runs an operation."""
    traffic = timeline.traffic(op)
    return Row(
        line,
        op.kind,
        TENSOR if isinstance(op, Compute) and op.exchange else op.kind,
        paths,
        gradients or isinstance(op, Reduce | Defer) or ends(op, Reduce),
        traffic.sent if starts_collective(op) else None,
        traffic.full if isinstance(op, Defer) else 0,
        gathered,
        format_of(op, timeline),
    )


def _code_row(line: SourceLine, op: Op, timeline: Timeline, gathered: int) -> Row:
    """Return the row of a line that encodes a payload before a launch, or decodes a payload in a wait."""
    launch = op.launch if isinstance(op, Wait) else op
    assert isinstance(launch, Launch), "nothing else is encoded"
    form = str(timeline.travels_as(launch, timeline.params_of(launch)[0]))
    return Row(line, None, CODES[op.kind], op.params, isinstance(launch, Reduce), None, 0, gathered, form)


def format_of(op: Op, timeline: Timeline) -> str:
    """Return the encoding of a launch's messages; "" without an encoding."""
    if not isinstance(op, Launch):
        return ""
    encoding = timeline.travels_as(op, timeline.params_of(op)[0])
    return str(encoding) if encoding.block else ""


def select(rows: Sequence[Row], plan: Plan, unit: str | None, only: str | None) -> tuple[Row | Gap, ...]:
    """Return the rows of a unit that ``ONLY[only]`` selects. The default is all units and all lines.

    A unit's rows extend from the first to the last row that waits for its parameters or computes with them. The unit's
    collectives and frees outside this range are included. Omitted rows become gaps.
    """
    if unit is not None and unit not in plan.units:
        raise ValueError(f"unit is {unit!r}; the units of this module are {', '.join(map(repr, plan.units))}")
    if only is not None and only not in ONLY:
        raise ValueError(f"only is {only!r}; choose {' or '.join(map(repr, ONLY))}, or None for all lines")
    candidates = range(len(rows)) if unit is None else _of_unit(rows, plan, unit)
    chosen = [index for index in candidates if only is None or ONLY[only](rows[index])]
    shown: list[Row | Gap] = list(rows[chosen[0] : chosen[0] + 1]) if chosen else []
    for previous, index in pairwise(chosen):
        between = rows[previous + 1 : index]
        gap = between if len(between) < 2 else [Gap(len(between))]  # a gap of one line would save nothing
        shown += [*gap, rows[index]]
    return tuple(shown)


def total(rows: Iterable[Row | Gap]) -> str:
    """Return a line with the number of collectives, the bytes that this rank sends, and the most gathered bytes.

    Collectives of tensor parallelism and deferred gradients each get a further line.
    """
    shown = [row for row in rows if isinstance(row, Row)]
    gathers, reduces = (sum(row.kind == kind for row in shown) for kind in ("gather", "reduce"))
    sent, slices = sum(row.sent or 0 for row in shown), [row.sent for row in shown if row.does == TENSOR and row.sent]
    slices_text = f"\nand {len(slices)} of torch's tensor parallelism, which send {sum(slices):,} of these bytes"
    peak = max((row.gathered for row in shown), default=0)
    count = gathers + reduces
    deferred = sum(row.deferred for row in shown)
    return (
        f"{count} collective{'s' * (count != 1)} ({gathers} gather, {reduces} reduce), "
        f"{sent:,} B sent by this rank, {peak:,} B gathered at most"
        + slices_text * bool(slices)
        + (f"\n{deferred:,} B of full gradients are held for a later backward" if deferred else "")
    )


def label(params: Sequence[str], plan: Plan, *, gradients: bool) -> str:
    """Return a short name of parameters: a path, two names of one module, or a unit and a count."""
    units = {plan.by_name[path].unit for path in params}
    parents = {path.rpartition(".")[0] for path in params}
    grad = "grad " if gradients else ""
    if len(params) > 2 and len(units) == 1 and units != {""}:
        return f"{units.pop()}: {len(params)} {'gradients' if gradients else 'parameters'}"
    if len(params) > 2:
        return f"{grad}{params[0]}, {len(params) - 1} more"
    if len(params) == 2 and len(parents) == 1:
        return f"{grad}{params[0]}, {params[1].rpartition('.')[2]}"
    return grad + ", ".join(params) if params else ""


def _of_unit(rows: Sequence[Row], plan: Plan, unit: str) -> list[int]:
    paths = {param.path for param in plan.params if param.unit == unit}
    touching = [index for index, row in enumerate(rows) if not paths.isdisjoint(row.params)]
    using = [
        index
        for index in touching
        if rows[index].kind == "compute" or (rows[index].kind == "wait" and not rows[index].gradients)
    ]
    return sorted({*touching, *(range(using[0], using[-1]) if using else ())})


def _parameters_in(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """Return a mapping from gathered values, replicated inputs and derived values to parameters."""
    params_in: dict[str, tuple[str, ...]] = {name: (timeline.inputs[name] or "",) for name in timeline.replicated}
    for op in timeline.ops:
        if ends(op, Gather):
            params_in.update((name, (path,)) for name, path in zip(op.writes, op.params, strict=True))
        elif isinstance(op, Compute):
            derived = [name for name in op.writes if name in timeline.derived]
            params_in.update(dict.fromkeys(derived, _lookup(op.reads, params_in)))
    return params_in


def _gradients(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """Return a mapping from values to the parameters whose full gradients they hold."""
    ops = (op for op in timeline.ops if isinstance(op, Reduce | Defer))
    return {name: (path,) for op in ops for name, path in zip(op.reads, op.params, strict=True)}


def _lookup(names: Iterable[str], params: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for name in names for path in params.get(name, ())))

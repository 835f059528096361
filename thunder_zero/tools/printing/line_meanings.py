"""Explains timelines, and each line of a trace from its timeline: kind, parameters, bytes.

::

    gather   fut0 <- t_w                           h.0.w                       a timeline alone
    wait     w <- fut0                             h.0.w

    ft1 = zero_all_gather(t_w, 'h.0.w')            gather  h.0.w          1.50 KiB   2.00 KiB      lines of a trace
    t2 = zero_wait(ft1)                            wait    h.0.w                     2.00 KiB
    t3 = torch.nn.functional.linear(x, t2, None)   compute h.0.w                     2.00 KiB
    del t2                                         free    h.0.w                          0 B

Lines are plain text here; this module does not know Thunder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.params import Plan
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline

BORDER = "-- backward --"
VALUES_WIDTH = 32  # fixed, so that the texts of two timelines can be compared line by line


def format_timeline(timeline: Timeline) -> str:
    """The operations in order: kind, writes and reads, parameters, and "again" for a copy. Long names make long lines.
    A border separates the phases."""
    lines = [_line(op) for op in timeline.ops]
    border = next((at for at, op in enumerate(timeline.ops) if op.backward), None)
    if border is not None:
        lines.insert(border, BORDER)
    return "\n".join(lines)


def _line(op: Op) -> str:
    reads = ", ".join(op.reads)
    values = reads if op.kind is Kind.FREE else f"{', '.join(op.writes)} <- {reads}".strip()
    return f"{op.kind:<8} {values:<{VALUES_WIDTH}}  {', '.join(op.params)}{'  again' if op.repeated else ''}".rstrip()


PHASES = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of a trace.

    Attributes:
        code: its Python statement.
        position: its position in the trace of its phase, as in ``Op.source``.
        origin: the line of the user's program that it comes from; "" if unknown.
        alive: bytes of all tensors alive after it, as forecast; None if there is no forecast.
        peak: the most bytes alive while it runs, if that is the peak of the step; else None.
    """

    code: str
    position: int
    origin: str = ""
    alive: int | None = None
    peak: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A line and its meaning.

    Attributes:
        kind: of its operation; None for lines that have none (unpacking, the ``del`` of an activation, codes).
        does: what it does: its kind, "encode" or "decode", or "tensor" for a collective of torch's tensor parallelism
            and the wait for it; "" for lines outside the schedule.
        params: paths of the parameters that it moves, frees or reads, or whose gradients it makes.
        gradients: it handles the gradients of the parameters, not the parameters.
        sent: bytes that this rank sends; None if the line launches no collective.
        deferred: bytes of a full gradient that is held until a later backward reduces it.
        gathered: bytes of gathered parameters alive after the line.
        form: the format in which a collective sends bytes, such as "int8/128"; "" if it sends what it reads.
    """

    line: SourceLine
    kind: Kind | None
    does: str
    params: tuple[str, ...]
    gradients: bool
    sent: int | None
    deferred: int
    gathered: int
    form: str = ""

    def label(self, plan: Plan) -> str:
        """Return the parameters in a few words, with the format in which they are sent."""
        names = label(self.params, plan, gradients=self.gradients)
        return f"{names} as {self.form}" if self.form else names


CODES = {Kind.GATHER: "encode", Kind.REDUCE: "encode", Kind.WAIT: "decode"}  # the other line of an operation

ONLY: Mapping[str, Callable[[Row], bool]] = {
    "parameters": lambda row: bool(row.params),
    "communication": lambda row: row.does in (*LAUNCHES, Kind.WAIT, TENSOR, *CODES.values()),
}


@dataclass(frozen=True, slots=True)
class Gap:
    """A number of lines that are not shown."""

    lines: int


def rows(lines: Iterable[SourceLine], timeline: Timeline, *, backward: bool) -> tuple[Row, ...]:
    """The lines of one phase of a timeline, each with its meaning."""
    alive = gathered_bytes(timeline)
    values, gradients = _parameters_in(timeline), _gradients(timeline)
    places: dict[int, list[int]] = {}
    codes: dict[int, Op] = {}
    for at, op in enumerate(timeline.ops):
        if op.backward is backward:
            places.setdefault(op.source[0], []).append(at)
            codes |= dict.fromkeys(op.source[1:], op)
    first = min((at for ats in places.values() for at in ats), default=0)
    now = alive[first - 1] if first else 0
    out: list[Row] = []
    for line in lines:
        if line.position in codes:
            out.append(_code(line, codes.pop(line.position), timeline, now))
            continue
        ats = places.pop(line.position, [])
        ops = [timeline.ops[at] for at in ats]
        now = alive[ats[-1]] if ats else now
        read = _merged(op.params if op.kind is not Kind.COMPUTE else _of(op.reads, values) for op in ops)
        made = _merged(_of(op.writes, gradients) for op in ops if op.kind is Kind.COMPUTE)
        reduces = any(op.kind in (Kind.REDUCE, Kind.DEFER) or timeline.ends(op, Kind.REDUCE) for op in ops)
        is_torchs = any(op.is_torchs for op in ops)
        launches = any(op.kind in LAUNCHES or op.sends for op in ops)
        sent = sum(map(timeline.bytes_sent, ops)) if launches else None
        deferred = sum(timeline.full_bytes(op) for op in ops if op.kind is Kind.DEFER)
        of_gradients = reduces or (not read and bool(made))
        kind, forms = ops[0].kind if ops else None, {form for op in ops if (form := format_of(op, timeline))}
        form = ", ".join(sorted(forms))
        does = TENSOR if is_torchs else str(kind or "")
        out.append(Row(line, kind, does, read or made, of_gradients, sent, deferred, now, form))
    if places:
        raise ValueError(f"the timeline has operations at positions {sorted(places)}, but the trace has no lines there")
    return tuple(out)


def _code(line: SourceLine, op: Op, timeline: Timeline, gathered: int) -> Row:
    """The row of a line that encodes what a launch sends, or decodes what a wait brings."""
    launch = timeline.launches[op.reads[0]] if op.kind is Kind.WAIT else op
    form = str(timeline.travels_as(launch, timeline.params_of(launch)[0]))
    is_gradient = launch.kind is Kind.REDUCE
    return Row(line, None, CODES[op.kind], op.params, is_gradient, None, 0, gathered, form)


def format_of(op: Op, timeline: Timeline) -> str:
    """Return the format in which a launch sends bytes; "" if it sends what it reads."""
    if op.kind not in LAUNCHES:
        return ""
    encoding = timeline.travels_as(op, timeline.params_of(op)[0])
    return str(encoding) if encoding.block else ""


def select(rows: Sequence[Row], plan: Plan, unit: str | None, only: str | None) -> tuple[Row | Gap, ...]:
    """Return the rows of one unit, or of all (None); of these, if ``only`` names one of ``ONLY``, those that fit it.

    The rows of a unit are those from the first to the last that waits for its parameters or computes with them, and its
    other collectives and frees, which may be far from these.
    """
    if unit is not None and unit not in plan.units:
        raise ValueError(f"unit is {unit!r}; the units of this module are {', '.join(map(repr, plan.units))}")
    if only is not None and only not in ONLY:
        raise ValueError(f"only is {only!r}; choose {' or '.join(map(repr, ONLY))}, or None for all lines")
    candidates = range(len(rows)) if unit is None else _of_unit(rows, plan, unit)
    chosen = [at for at in candidates if only is None or ONLY[only](rows[at])]
    out: list[Row | Gap] = list(rows[chosen[0] : chosen[0] + 1]) if chosen else []
    for before, at in pairwise(chosen):
        between = rows[before + 1 : at]
        out += [*between, rows[at]] if len(between) < 2 else [Gap(len(between)), rows[at]]  # a gap takes a line too
    return tuple(out)


def total(rows: Iterable[Row | Gap]) -> str:
    """The number of collectives, the bytes that this rank sends and the peak of gathered bytes, in one line; a second
    line has the bytes of deferred gradients."""
    shown = [row for row in rows if isinstance(row, Row)]
    gathers, reduces = (sum(row.kind is kind for row in shown) for kind in LAUNCHES)
    sent, slices = sum(row.sent or 0 for row in shown), [row.sent for row in shown if row.does == TENSOR and row.sent]
    torchs = f"\nand {len(slices)} of torch's tensor parallelism, which send {sum(slices):,} of these bytes"
    peak = max((row.gathered for row in shown), default=0)
    count = gathers + reduces
    deferred = sum(row.deferred for row in shown)
    return (
        f"{count} collective{'s' * (count != 1)} ({gathers} gather, {reduces} reduce), "
        f"{sent:,} B sent by this rank, {peak:,} B gathered at most"
        + torchs * bool(slices)
        + (f"\n{deferred:,} B of full gradients are held for a later backward" if deferred else "")
    )


def label(params: Sequence[str], plan: Plan, *, gradients: bool) -> str:
    """Parameters in a few words: a path, two names of one module, or a unit and a number."""
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
    own = {param.path for param in plan.params if param.unit == unit}
    touching = [at for at, row in enumerate(rows) if not own.isdisjoint(row.params)]
    using = [
        at
        for at in touching
        if rows[at].kind is Kind.COMPUTE or (rows[at].kind is Kind.WAIT and not rows[at].gradients)
    ]
    return sorted({*touching, *(range(using[0], using[-1]) if using else ())})


def _parameters_in(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """The parameters that each gathered value, each replicated input and each derived value depends on."""
    params_in: dict[str, tuple[str, ...]] = {name: (timeline.inputs[name] or "",) for name in timeline.replicated}
    for op in timeline.ops:
        if timeline.ends(op, Kind.GATHER):
            params_in.update((name, (path,)) for name, path in zip(op.writes, op.params, strict=True))
        elif op.kind is Kind.COMPUTE:
            derived = [name for name in op.writes if name in timeline.derived]
            params_in.update(dict.fromkeys(derived, _of(op.reads, params_in)))
    return params_in


def _gradients(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """The parameters whose full gradient each value is; several if one value is the gradient of all of them."""
    found: dict[str, tuple[str, ...]] = {}
    for op in timeline.ops:
        if op.kind in (Kind.REDUCE, Kind.DEFER):
            one_each = len(op.reads) == len(op.params)
            found.update((name, (op.params[at],) if one_each else op.params) for at, name in enumerate(op.reads))
    return found


def _of(names: Iterable[str], params: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return _merged(params.get(name, ()) for name in names)


def _merged(parts: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))

"""The rows of a step: each line of a trace with its meaning, from the timeline of the program.

::

    ft1 = zero_all_gather(t_w, 'h.0.w')            gather  h.0.w          1.50 KiB   2.00 KiB
    t2 = zero_wait(ft1)                            wait    h.0.w                     2.00 KiB
    t3 = torch.nn.functional.linear(x, t2, None)   compute h.0.w                     2.00 KiB
    del t2                                         free    h.0.w                          0 B

Lines are plain text. This module does not use Thunder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from thunder_zero.plan.amounts import WIDTH, summed_up
from thunder_zero.plan.mesh import TENSOR
from thunder_zero.plan.outer import SITE
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
from thunder_zero.tools.printing.words import clip, short

PHASES = {"forward": ("forward",), "backward": ("backward",), "both": ("forward", "backward")}
CODES = {"gather": "encode", "reduce": "encode", "wait": "decode"}  # kinds of lines that encode or decode
COMPUTES = ("compute", TENSOR)
# phases without a trace
DIGESTS, LOSS, OPTIMIZER_STEP, OUTER_STEP = "digests", "loss", "optimizer step", "outer step"
AFTER_BACKWARD = (OPTIMIZER_STEP, OUTER_STEP)


@dataclass(frozen=True, slots=True, repr=False)
class Row:
    """A line of a step."""

    phase: str  # "digests", "forward", "loss", "backward", "optimizer step" or "outer step"
    position: int  # its position in its phase's trace, as in ``Traces.lines``; -1 outside a trace
    code: str  # its Python statement
    origin: str = ""  # the line of the user's program; "" if unknown
    op: int | None = None  # the index in the timeline of the operation that the line runs
    # the kind of its operation, "encode", "decode", "tensor" for torch's tensor parallelism, or "site" for an exchange
    # with other sites. "" for unpacking, the ``del`` of an activation, and other lines outside a trace
    kind: str = ""
    params: tuple[str, ...] = ()  # paths of its parameters, including parameters whose gradients it computes
    gradients: bool = False  # True if it handles gradients of the parameters
    unit: str = ""  # the unit of its parameters, or else of the lines around it
    form: str = ""  # the encoding of a collective's messages, such as "int8/128"; "" without an encoding
    work: str = ""  # the class of its computation, such as "matmul"
    # flops, moved: of a loss and an optimizer's step, a forecast of time has them
    flops: int = 0  # of its products, attention and convolutions
    moved: int = 0  # bytes that it reads and writes in memory
    repeats: tuple[int, ...] = ()  # the FLOPs of each operation of forward that it computes again
    over: str = ""  # the axis of the mesh over which it launches a collective; "site" for an exchange with other sites
    # bytes that this rank sends, in an exchange with other sites not in every step; None if it launches no collective
    sent: int | None = None
    deferred: int = 0  # bytes of full gradients that it keeps for the reduction in a later backward
    unsharded: int = 0  # bytes of gathered parameters alive after it, from the launches of their gathers
    # allocated, freed: bytes that it allocates and frees, keyed by kind of data, as in
    # :class:`thunder_zero.tools.Holds`: a gathered parameter is a buffer of a collective until the wait
    allocated: Mapping[str, int] = field(default_factory=dict)
    freed: Mapping[str, int] = field(default_factory=dict)
    # the tensors that it writes, keyed by name: "shape", "dtype" and "storage", the index in ``Memory.storages``. A
    # view has a storage that an earlier line allocated
    written: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alive: int | None = None  # bytes of all tensors alive after it; None without a forecast of memory
    highest: int | None = None  # the most bytes alive while it runs
    is_peak: bool = False  # True if the step's peak is in this line
    types: str = ""  # what it writes is on each axis of the mesh, such as "dp:S tp:P"; "" if nobody asked, or unknown
    # start, end: when compute runs it, in seconds since the step began; None without a forecast of time
    start: float | None = None
    end: float | None = None
    exposed: float = 0.0  # seconds of it that compute waits for a wire
    lane: str = ""  # the wire that carries the collective it launches
    # wire_start, wire_end: when the wire carries the collective
    wire_start: float | None = None
    wire_end: float | None = None

    def __repr__(self) -> str:
        return summed_up(self, f"{self.phase}, {self.kind or 'no operation'}: {clip(self.statement, WIDTH)}")

    @property
    def ran(self) -> int:
        """The index in the timeline of its operation. Raise ValueError if the line runs none."""
        if self.op is None:
            raise ValueError(f"this line runs no operation of the timeline: {self!r}")
        return self.op

    @property
    def wire_seconds(self) -> float:
        """Seconds of its collective on the wire."""
        return 0.0 if self.wire_start is None or self.wire_end is None else self.wire_end - self.wire_start

    @property
    def statement(self) -> str:
        """The code on one line, with short names of operators and without comments; a comment alone, as text."""
        lines = (line.partition("  #")[0].strip() for line in self.code.splitlines())
        return short(" ".join(line for line in lines if not line.startswith("#"))) or self.code.removeprefix("# ")


# the rows that ``only=`` selects when a trace is printed
ONLY: Mapping[str, Callable[[Row], bool]] = {
    "parameters": lambda row: bool(row.params),
    "communication": lambda row: row.kind in (*CODES, TENSOR, SITE, *CODES.values()),
}


def explained(
    lines: Iterable[Row], timeline: Timeline, positions: Sequence[Sequence[int]], *, backward: bool, unit: str = ""
) -> Iterator[Row]:
    """Yield the lines of one phase with their meanings. ``positions`` are :attr:`Traces.lines`.

    A line without parameters has the unit of the computation before it, at first ``unit``.
    """
    alive, read = gathered_bytes(timeline), parameters_in(timeline)
    reductions = (op for op in timeline.ops if isinstance(op, Reduce | Defer))
    made = {name: (path,) for op in reductions for name, path in zip(op.reads, op.params, strict=True)}  # gradients
    index_of = {
        position: index
        for index, (op, of_op) in enumerate(zip(timeline.ops, positions, strict=True))
        for position in of_op
        if op.backward is backward
    }
    unsharded = alive[timeline.backward_start - 1] if backward else 0
    for line in lines:
        index = index_of.pop(line.position, None)
        if index is None:
            yield replace(line, unit=unit, unsharded=unsharded)
            continue
        op = timeline.ops[index]
        if line.position != positions[index][0]:
            yield replace(line, unsharded=unsharded, **_code_of(op, timeline))
            continue
        unsharded = alive[index]
        reads = op.returned if isinstance(op, Return) else op.reads
        paths = look_up(reads, read) or look_up(op.writes, made) if isinstance(op, Compute | Return) else op.params
        is_made = isinstance(op, Compute) and not look_up(op.reads, read) and bool(paths)
        is_of_gradients = is_made or isinstance(op, Reduce | Defer) or ends(op, Reduce)
        own = timeline.plan.by_name[paths[0]].unit if paths else unit
        unit = own if isinstance(op, Compute) else unit
        means = _meaning(op, timeline) if op.params or not isinstance(op, Free) else {}
        yield replace(line, op=index, params=paths, gradients=is_of_gradients, unsharded=unsharded, unit=own, **means)
    if missing := [index for index in index_of.values() if (op := timeline.ops[index]).params or op.kind != "free"]:
        raise ValueError(f"the trace has no lines of the operations at {sorted(missing)} of the timeline")


def _meaning(op: Op, timeline: Timeline) -> dict[str, Any]:
    """Return the columns of a row that its operation alone decides."""
    traffic, starts = timeline.traffic(op), starts_collective(op)
    encoding = timeline.travels_as(op, timeline.params_of(op)[0]) if isinstance(op, Launch) else None
    return {
        "kind": TENSOR if isinstance(op, Compute) and op.between_slices else op.kind,
        "form": str(encoding) if encoding and encoding.block else "",
        "work": str(op.work) if isinstance(op, Compute) else "",
        "flops": op.flops if isinstance(op, Compute) else 0,
        "moved": timeline.moved(op),
        "repeats": timeline.repeats(op),
        "over": op.over if isinstance(op, Launch) else TENSOR * starts,
        "sent": traffic.sent if starts else None,
        "deferred": traffic.full if isinstance(op, Defer) else 0,
    }


def _code_of(op: Op, timeline: Timeline) -> dict[str, Any]:
    """Return the columns of a line that encodes a payload before a launch, or decodes a payload in a wait."""
    launch = op.launch if isinstance(op, Wait) else op
    assert isinstance(launch, Launch), "nothing else is encoded"
    param, is_gradient = timeline.params_of(launch)[0], isinstance(launch, Reduce)
    is_weighed = is_gradient and op is launch and timeline.plan.weighs_gradient(param, launch.over)
    return {
        "kind": CODES[op.kind],
        "params": op.params,
        "gradients": is_gradient,
        "form": str(timeline.travels_as(launch, param)) + f" x {timeline.plan.weight:.4g}" * is_weighed,
        "unit": param.unit,
    }


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


def row_label(row: Row, plan: Plan) -> str:
    """Return a short name of a row's parameters, and the encoding of its messages."""
    names = label(row.params, plan, gradients=row.gradients)
    return f"{names} as {row.form}" if row.form else names


def totals(rows: Iterable[Row]) -> dict[str, int]:
    """Return the launches of rows in every step, the bytes that this rank sends in them, and what is computed again.

    Exchanges with other sites are left out, since they are not in every step.
    """
    launches, sent, again = Counter[str](), Counter[str](), list[int]()
    for row in rows:
        again += row.repeats
        if row.sent is not None and row.over != SITE:
            launches[row.kind] += 1
            sent[row.kind] += row.sent
    counts = {"gathers": launches["gather"], "reduces": launches["reduce"], "slices": launches[TENSOR]}
    of_bytes = {"sent": sent.total(), "sent by slices": sent[TENSOR]}
    return counts | of_bytes | {"recomputed": len(again), "its FLOP": sum(again)}


def parameters_in(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """Return a mapping from gathered values, replicated inputs and derived values to parameters."""
    params_in: dict[str, tuple[str, ...]] = {name: (timeline.inputs[name] or "",) for name in timeline.replicated}
    for op in timeline.ops:
        if ends(op, Gather):
            params_in.update((name, (path,)) for name, path in zip(op.writes, op.params, strict=True))
        elif isinstance(op, Compute):
            derived = [name for name in op.writes if name in timeline.derived]
            params_in.update(dict.fromkeys(derived, look_up(op.reads, params_in)))
    return params_in


def look_up(names: Iterable[str], params: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for name in names for path in params.get(name, ())))

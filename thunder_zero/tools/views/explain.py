"""``tz.explain``: shows where a parameter is gathered, freed and reduced, and the reasons.

In: traces and the path of a parameter. Out: an :class:`Explanation`. The lines come from the timeline. The
reason for the position of each gather comes from the prefetch pass::

    gather      fut0 = zero_all_gather(t_w, 'h.1.w')
                alone; it starts right after the wait for h.0.w, one unit ahead (Policy.prefetch)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, TypeVar

from thunder_zero.capture.zero_module import traces_of
from thunder_zero.plan.amounts import size
from thunder_zero.plan.geometry import cut_rows
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.plan.traffic import Traffic, gather_traffic, reduce_traffic
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Compute, Defer, Free, Gather, Op, Reduce, Return, Wait
from thunder_zero.schedule.prefetch import Bound, bounds
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.tools.table.rows import Row, label
from thunder_zero.tools.table.table import Table, table_of, with_code
from thunder_zero.tools.time.estimate import estimate
from thunder_zero.tools.views.explanation import Explanation, Gathered, Reduced
from thunder_zero.traces.compiled import Traces

if TYPE_CHECKING:
    from thunder.core.module import ThunderModule

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
NEAR = 3  # the most names that an error proposes


def explain(model_or_traces: ThunderModule | Traces, path: str, *, device: Device | str | None = None) -> Explanation:
    """Explain the gathers, frees and gradient reduction of one parameter in a step. The result prints as text.

    >>> print(tz.explain(traces, "blocks.3.mlp.weight", device="h100"))

    Args:
        model_or_traces: a model with ZeroTransform that was called, or the result of :func:`thunder_zero.trace`.
        path: the parameter's path, as in ``module.named_parameters()``. A tied parameter has several paths.
        device: as for :func:`thunder_zero.tools.estimate` (default: the result has no seconds).

    Returns:
        This rank's rows, the parameter's gathers, and its gradient. A gather has the lines of the launch, the wait, the
        reads and the free, with reasons for their positions. It also has bytes sent, bytes received and memory. The
        gradient has the lines that compute it, reduce it and wait for the reduction.
    """
    described = None if device is None else device_of(device)
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    _require_parameter(path, traces)
    table = table_of(traces, time=estimate(traces, described) if described else None, codes=False)
    return _explanation(_Program(table), traces.plan.by_name[path])


def explain_all(table: Table) -> dict[str, Explanation]:
    """Return explanations keyed by parameter path."""
    program = _Program(table)
    return {param.path: _explanation(program, param) for param in table.traces.plan.params}


def _explanation(program: _Program, param: Param) -> Explanation:
    traces, plan = program.traces, program.traces.plan
    gathers, gradient = _gathers(program, param), _gradient(program, param)
    owned = plan.geometry(param).rows
    return Explanation(
        param=param,
        plan=plan,
        rows=(owned.start, owned.stop) if param.sharded else None,
        resting_bytes=prod(plan.shard_shape(param)) * param.rest_dtype.itemsize,
        lifetime=_lifetime(param, traces.timeline, len(gathers)),
        gathers=gathers,
        gradient=gradient,
        why_no_gradient="" if gradient else _why_no_gradient(param, traces),
        device=program.table.time.device.name if program.table.time else None,
    )


def _require_parameter(path: str, traces: Traces) -> None:
    plan = traces.plan
    if path in plan.by_name:
        return
    if path in traces.others.values():
        raise ValueError(
            f"{path!r} is a buffer, or a parameter that Policy.ignored names; nothing gathers or reduces it"
        )
    near = get_close_matches(path, plan.by_name, NEAR, cutoff=0.5) or list(plan.by_name)[:NEAR]
    raise ValueError(f"there is no parameter {path!r}; the nearest names are {', '.join(map(repr, near))}")


def _why_no_gradient(param: Param, traces: Traces) -> str:
    if not param.requires_grad:
        return "it is frozen (requires_grad=False)"
    return "there is no backward" if traces.backward is None else "backward does not reach it"


@dataclass(frozen=True)
class _Program:
    """A program, with lookup tables that the explanations of all parameters share."""

    table: Table

    @property
    def traces(self) -> Traces:
        return self.table.traces

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        return gathered_bytes(self.traces.timeline)

    @cached_property
    def why(self) -> dict[str, tuple[int, Bound]]:
        return bounds(self.traces.timeline)

    # These tables list positions in ascending order, so that no parameter searches the whole timeline.

    @cached_property
    def by_path(self) -> Mapping[tuple[type[Op], str], Sequence[int]]:
        """Positions of operations, keyed by (type, path of a parameter)."""
        ops = self.traces.timeline.ops
        return _grouped(((type(op), path), index) for index, op in enumerate(ops) for path in op.params)

    @cached_property
    def readers(self) -> Mapping[str, Sequence[int]]:
        """Positions of the operations that read each value, except returns."""
        ops = enumerate(self.traces.timeline.ops)
        return _grouped((name, index) for index, op in ops if not isinstance(op, Return) for name in op.reads)

    def reader(self, name: str, kind: type[Op], after: int = -1) -> int | None:
        """Return the first operation of a type that reads a value after a position, or None."""
        ops = self.traces.timeline.ops
        readers = (index for index in self.readers.get(name, ()) if index > after)
        return next((index for index in readers if isinstance(ops[index], kind)), None)

    def line(self, index: int | None) -> Row | None:
        """Return the row of an operation, if there is one."""
        return None if index is None else self.of(index)

    def of(self, index: int) -> Row:
        row = self.table.of(index)
        return row if row.code else with_code(row, self.traces)

    def seconds(self, positions: Iterable[int | None]) -> tuple[float | None, float | None]:
        """Return the seconds of a bucket on the wires, and the seconds that compute waits for it.

        ``positions`` has the bucket's launches and waits. Without overlap, compute waits at the launch.
        """
        if self.table.time is None:
            return None, None
        rows = [self.table.of(index) for index in positions if index is not None]
        return sum(row.wire_seconds for row in rows), sum(row.exposed for row in rows)


def _grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    groups: dict[Key, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups


def _gathers(program: _Program, param: Param) -> tuple[Gathered, ...]:
    ops, launches = program.traces.timeline.ops, program.by_path.get((Gather, param.path), ())
    return tuple(_gathered(program, param, launch, *program.why[ops[launch].writes[0]]) for launch in launches)


def _gathered(program: _Program, param: Param, launch: int, after: int, bound: Bound) -> Gathered:
    timeline = program.traces.timeline
    op, plan = timeline.ops[launch], timeline.plan
    wait = program.reader(op.writes[0], Wait)
    assert wait is not None
    name = timeline.ops[wait].writes[op.params.index(param.path)]
    free = next((index for index in program.by_path.get((Free, param.path), ()) if index > wait), None)
    readers = _readers(program, name, wait)
    first, last = (readers[0], readers[-1]) if readers else (None, None)
    wire, exposed = program.seconds((launch, wait))
    traffic = gather_traffic(plan, param)
    return Gathered(
        bucket=op.params,
        bucket_bytes=timeline.traffic(op).full,
        launch=program.of(launch),
        why_launch=_why_launch(timeline, launch, after, bound),
        wait=program.of(wait),
        first_read=program.line(first),
        last_read=program.line(last),
        free=program.line(free),
        why_free=_why_free(program, wait, free, last),
        sent_bytes=traffic.sent,
        received_bytes=traffic.received,
        nbytes=param.full_bytes,
        gathered_at_most=max(program.gathered[launch : len(timeline.ops) if free is None else free]),
        wire_seconds=wire,
        exposed_seconds=exposed,
    )


def _readers(program: _Program, name: str, wait: int) -> list[int]:
    """Return the operations that read a gathered value, or a view or a cast of it."""
    timeline, derived_names, readers = program.traces.timeline, [name], set[int]()
    for derived_name in derived_names:  # the loop appends to the list
        for index in program.readers.get(derived_name, ()):
            if index > wait and isinstance(timeline.ops[index], Compute) and index not in readers:
                readers.add(index)
                derived_names += [written for written in timeline.ops[index].writes if written in timeline.derived]
    return sorted(readers)


def _gradient(program: _Program, param: Param) -> Reduced | None:
    timeline, plan = program.traces.timeline, program.traces.plan
    launches = [index for kind in (Reduce, Defer) for index in program.by_path.get((kind, param.path), ())]
    if not launches:
        return None
    first, last = min(launches), max(launches)  # two launches with replicas
    op = timeline.ops[first]
    gradient = op.reads[op.params.index(param.path) if len(op.reads) == len(op.params) else 0]
    writer, is_sent = timeline.writer.get(gradient), isinstance(op, Reduce)
    waits = [program.reader(timeline.ops[index].writes[0], Wait) for index in launches if is_sent]
    wait = max((index for index in waits if index is not None), default=None)
    wire, exposed = program.seconds((*launches, *waits)) if is_sent else (None, None)
    traffic = reduce_traffic(plan, param) if is_sent else Traffic()
    deferred = "no_sync keeps all of it until a later backward"
    return Reduced(
        made=program.line(writer),
        launch=program.of(first),
        across=program.of(last) if last > first else None,
        wait=program.line(wait),
        why_wait=deferred if wait is None else _why_wait(program, wait),
        bucket=op.params,
        bucket_bytes=timeline.traffic(op).full,
        sent_bytes=traffic.sent,
        received_bytes=traffic.received,
        nbytes=param.grad_bytes,
        wire_seconds=wire,
        exposed_seconds=exposed,
    )


def _lifetime(param: Param, timeline: Timeline, gathers: int) -> str:
    """Describe when the stage gathers and frees a parameter. ``gathers`` counts the gathers in a step."""
    plan = timeline.plan
    stage = STAGES[plan.policy.stage]
    if not param.sharded:
        return f"every rank has all of it: {_why_replicated(param, plan)}"
    if param.resident:
        return f"{stage.name} shards it for the optimizer; all of it stays in memory, so that nothing is freed"
    if gathers == 0:
        return f"{stage.name} gathers it where it is used"
    if stage.kept_unsharded:
        return f"{stage.name} gathers it once, in forward, and frees it after its last use"
    if not param.kept_unsharded and gathers == 1:
        return f"{stage.name} frees it after its last use in forward; {_no_backward(timeline)}"
    if not param.kept_unsharded:
        return f"{stage.name} frees it after its last use in each phase, and gathers it again for backward"
    return f"{stage.name} gathers it once for forward and backward: {_why_once(param, plan)}"


def _no_backward(timeline: Timeline) -> str:
    return "backward does not read it" if timeline.ops[-1].backward else "there is no backward"


def _why_replicated(param: Param, plan: Plan) -> str:
    policy = plan.policy
    if not STAGES[policy.stage].sharded:
        return "DDP shards nothing"
    if not cut_rows(param.shape, plan.mesh).is_cut:
        return "it has no rows to cut"
    nbytes = prod(param.shape) * param.dtype.itemsize
    if nbytes < policy.replicate_below_bytes:
        return f"its {size(nbytes)} are below Policy.replicate_below_bytes={policy.replicate_below_bytes:,}"
    return "Policy.replicated names it"


def _why_once(param: Param, plan: Plan) -> str:
    if param.unit in plan.policy.keep_unsharded:
        return "Policy.keep_unsharded names its unit"
    return "it is among the last that forward gathers, and staying does not raise the peak of gathered bytes"


def _why_launch(timeline: Timeline, launch: int, after: int, bound: Bound) -> str:
    """Return the reason for the position of a gather's launch.

    ``after`` and ``bound`` are the values that :func:`thunder_zero.schedule.prefetch.bounds` returns for the gather.
    """
    phase = "backward" if timeline.ops[launch].backward else "forward"
    if bound is Bound.PHASE:
        return f"it starts with {phase}, so that it ends as soon as it can"
    if bound is Bound.USE:
        field = "prefetch" if timeline.plan.sizes.ahead_bytes else "in_flight_bytes"
        return f"it starts right before its use: Policy.{field}=0"
    place = _place(timeline, after)
    if bound is Bound.PREFETCH:
        prefetch = timeline.plan.sizes.prefetch
        count = "one unit" if prefetch == 1 else f"{prefetch} units"
        return f"it starts {place}, {count} ahead (Policy.prefetch)"
    if bound is Bound.TIMES:
        return f"it starts {place}: by the measured times (Policy.times) it still ends before its use"
    if bound is Bound.FIRST:
        return f"it starts {place}: the first gather of {phase} has the wire to itself"
    if bound is Bound.IN_FLIGHT:
        limit = size(timeline.plan.sizes.in_flight_bytes)
        return f"it starts {place}: earlier, more than {limit} would be in flight (Policy.in_flight_bytes)"
    return "it starts after the gather before it, whose use comes first, or after the line that writes its shard"


def _place(timeline: Timeline, after: int) -> str:
    """Describe a position, such as ``right after the wait for blocks.1: 6 parameters``."""
    op = timeline.ops[after]
    if isinstance(op, Wait):
        return f"right after the wait for {label(op.params, timeline.plan, gradients=False)}"
    return "right before backward first reads a bucket that forward gathered"


def _why_free(program: _Program, wait: int, free: int | None, last_read: int | None) -> str:
    """Return why a parameter is freed at position ``free``, or why it stays gathered if ``free`` is None."""
    timeline = program.traces.timeline
    op = timeline.ops[wait]
    if free is None:
        return "it stays in memory"
    if last_read is None:
        return "nothing reads it: it is gathered with its bucket"
    if timeline.ops[free].backward and not op.backward:
        return "after its last use in backward, which reads what forward gathered"
    gathers = (program.by_path.get((Gather, path), ()) for path in timeline.ops[free].params)
    if any(index > free for indices in gathers for index in indices):
        return "after its last use in this phase; it is gathered again"
    return "after its last use" if op.backward else f"after its last use; {_no_backward(timeline)}"


def _why_wait(program: _Program, wait: int) -> str:
    """Return the reason for the position ``wait`` of a wait for a reduction."""
    timeline = program.traces.timeline
    op, later_ops = timeline.ops[wait], timeline.ops[wait + 1 :]
    if not any(isinstance(later, Compute) and later.writes for later in later_ops):
        return "at the end of backward, behind all of its compute"
    if any(program.reader(gradient, Compute, after=wait) is not None for gradient in op.writes):
        return "right before the line that reads the reduced gradient"
    limit = size(timeline.plan.sizes.in_flight_bytes)
    if isinstance(next(later for later in later_ops if not isinstance(later, Wait | Free)), Gather):
        event = "gathers start ahead: with them"
    else:
        event = "the next gradient is made: with it"
    return f"before {event}, more than {limit} would be in flight (Policy.in_flight_bytes)"

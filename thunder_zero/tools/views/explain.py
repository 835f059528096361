"""``tz.explain``: shows where a parameter is gathered, freed and reduced, and the reasons.

In: traces and the path of a parameter. Out: an :class:`Explanation`, which prints::

    at rest     rows 0 to 7 of 64 on this rank, 2.00 KiB of 16.0 KiB
    forward
      gather    fut0 = zero_all_gather(t_w, 'h.0.w')
                alone; it starts with forward, so that it ends as soon as it can

The reasons come from the passes of the schedule. ``why_...`` functions say why a line stands where it stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from math import prod
from textwrap import wrap

from thunder_zero.capture.zero_module import as_traces
from thunder_zero.plan.amounts import WIDTH, duration, name_of, size, summed_up
from thunder_zero.plan.formats import Format
from thunder_zero.plan.geometry import cut_rows
from thunder_zero.plan.mesh import REPLICATE, SHARD
from thunder_zero.plan.outer import SITE
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.plan.traffic import Traffic, gather_traffic, reduce_traffic
from thunder_zero.schedule.ops import Compute, Free, Gather, Op, Wait
from thunder_zero.schedule.prefetch import Bound
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.printing.words import clip, place_of
from thunder_zero.tools.table.rows import COMPUTES, Row, label
from thunder_zero.tools.table.table import Table, table_of
from thunder_zero.tools.time.estimate import estimate
from thunder_zero.traces.compiled import Traces

from thunder.core.module import ThunderModule

HANGING = 12  # columns
MOST = 2  # the most gathers in a summary
NEAR = 3  # the most names that an error proposes
OF_SLICES = {
    "all_reduce": "each rank has a part of a sum, and the lines behind it need all of it",
    "gather": "the lines behind it need the parts of all ranks",
    "scatter": "each rank has a part of a sum, and the lines behind it need some of its rows",
    "all_to_all": "the lines behind it need other parts than those that this rank has",
}


def explain(model_or_traces: ThunderModule | Traces, path: str, *, device: Device | str | None = None) -> Explanation:
    """Explain the gathers, frees and gradient reduction of one parameter in a step. The result prints as text.

    >>> print(tz.explain(traces, "blocks.3.mlp.weight", device="h100"))

    Without a device, the result has no seconds. A tied parameter has several paths.
    """
    traces = as_traces(model_or_traces)
    params = traces.plan.by_name
    if path in traces.others.values():
        raise ValueError(
            f"{path!r} is a buffer, or a parameter that Policy.ignored names; nothing gathers or reduces it"
        )
    if path not in params:
        near = get_close_matches(path, params, NEAR, cutoff=0.5) or list(params)[:NEAR]
        raise ValueError(f"there is no parameter {path!r}; the nearest names are {', '.join(map(repr, near))}")
    time = None if device is None else estimate(traces, device)
    return explanation_of(table_of(traces, time=time), params[path])


@dataclass(frozen=True, repr=False)
class Explanation:
    """The life of one parameter in a step of one rank."""

    step: Table  # the table of the step
    param: Param  # the parameter's entry in the plan: path, shape, dtypes, unit, lifetime
    # the rows of each gather, keyed by "gather" (the launch), "wait", "first use", "last use" (of the parameter, or of
    # a view or a cast of it) and "free". A key is missing if there is no such row.
    gathers: tuple[Mapping[str, Row], ...]
    # the rows of the gradient, keyed by "made", "reduce" (the launch) or "defer" (under ``no_sync``), "across" (the
    # launch over replicas) and "wait". Empty without a gradient.
    gradient: Mapping[str, Row]

    @property
    def lifetime(self) -> str:
        """A description of when the stage gathers and frees the parameter."""
        param, gathers, plan = self.param, len(self.gathers), self.step.traces.plan
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
            return f"{stage.name} frees it after its last use in forward; {_no_backward(self.step)}"
        if not param.kept_unsharded:
            return f"{stage.name} frees it after its last use in each phase, and gathers it again for backward"
        why = "it is among the last that forward gathers, and staying does not raise the peak of gathered bytes"
        if param.unit in plan.policy.keep_unsharded:
            why = "Policy.keep_unsharded names its unit"
        return f"{stage.name} gathers it once for forward and backward: {why}"

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank sends and receives for the parameter in a step."""
        plan, param, rows = self.step.traces.plan, self.param, self.step.by_param[self.param.path]
        return sum(
            (
                gather_traffic(plan, param) if row.kind == "gather" else reduce_traffic(plan, param, row.over)
                for row in rows
                if row.sent is not None and row.over != SITE
            ),
            Traffic(),
        )

    @property
    def exposed_seconds(self) -> float | None:
        """Seconds that compute waits for the buckets of the parameter in a step; None without a device."""
        times = [_times(rows, self.step) for rows in (*self.gathers, self.gradient)]
        return sum(exposed for _, exposed in times) if self.step.time else None

    def __repr__(self) -> str:
        return summed_up(self, f"{_name(self.param)}; {place_of(self.step.traces.plan)}; {_totals(self)}")

    def __str__(self) -> str:
        """Return text in 100 columns: this rank's rows, the first gathers, the gradient and the bytes of a step."""
        return "\n".join(_lines(self, MOST))

    def table(self) -> str:
        """Return the text of ``str(self)``, but with all gathers."""
        return "\n".join(_lines(self, len(self.gathers)))


def explanation_of(step: Table, param: Param) -> Explanation:
    rows = [row for row in step.by_param[param.path] if row.op is not None]
    gathers = (_gather(step, rows, launch) for launch in rows if launch.kind == "gather")
    return Explanation(step, param, tuple(gathers), _gradient(step, rows, param.path))


def _gather(step: Table, rows: Sequence[Row], launch: Row) -> dict[str, Row]:
    wait = step.wait_of(launch)
    later = [row for row in rows if row.ran > wait.ran]
    kinds = [row.kind for row in later]
    free = later[kinds.index("free")] if "free" in kinds else None
    until = kinds.index("wait") if "wait" in kinds else None
    reads = [row for row in later[:until] if row.kind in COMPUTES and not row.gradients]
    uses = {"first use": reads[0] if reads else None, "last use": reads[-1] if reads[1:] else None}
    found = {"gather": launch, "wait": wait, **uses, "free": free}
    return {name: row for name, row in found.items() if row}


def _gradient(step: Table, rows: Sequence[Row], path: str) -> dict[str, Row]:
    launches = [row for row in rows if row.kind in ("reduce", "defer")]
    if not launches:
        return {}
    first, last = launches[0], launches[-1]  # two launches with replicas
    timeline = step.traces.timeline
    op = timeline.ops[first.ran]
    made = timeline.writer.get(op.reads[op.params.index(path) if len(op.reads) == len(op.params) else 0])
    found = {
        "made": None if made is None else step.of(made),
        first.kind: first,
        "across": last if last is not first else None,
        "wait": step.wait_of(last) if last.kind == "reduce" else None,
    }
    return {name: row for name, row in found.items() if row}


def _times(rows: Mapping[str, Row], step: Table) -> tuple[float, float]:
    """Return the seconds of a gather or a gradient on wires, and the seconds that compute waits for them."""
    launches = [row for row in rows.values() if row.kind in ("gather", "reduce")]
    all_rows = [*launches, *(step.wait_of(launch) for launch in launches)]
    return sum(row.wire_seconds for row in all_rows), sum(row.exposed for row in all_rows)


def _lines(explanation: Explanation, max_gathers: int) -> Iterator[str]:
    param, plan, gradient = explanation.param, explanation.step.traces.plan, explanation.gradient
    yield from wrap(f"{_name(param)}; {place_of(plan)}", WIDTH)
    if plan.mesh.is_sliced:
        axis = plan.mesh.tensor
        piece = f"part {axis.place} of {axis.size} of {_shape(plan.whole_shape(param))}, along dimension {param.sliced}"
        all_of_it = f"none: each of the {axis.size} ranks of tensor parallelism computes with all of it"
        yield from _part("slice", all_of_it if param.sliced is None else piece)
    yield from _part("at rest", _at_rest(param, plan))
    yield from _part("", explanation.lifetime)
    if param.sharded and not explanation.gathers:
        yield from _part("gathers", "none: this program does not read it")
    for rows in explanation.gathers[:max_gathers]:
        yield from _gather_lines(rows, explanation)
    if hidden_gathers := len(explanation.gathers[max_gathers:]):
        yield f"... and {hidden_gathers} more gathers: table() has them"
    if gradient:
        yield from _gradient_lines(gradient, explanation)
    elif not param.requires_grad:
        yield from _part("gradient", "none: it is frozen (requires_grad=False)")
    else:
        has_backward = explanation.step.traces.backward is not None
        yield from _part(
            "gradient", f"none: {'backward does not reach it' if has_backward else 'there is no backward'}"
        )
    yield from _part("a step", _totals(explanation))


def _name(param: Param) -> str:
    aliases = f", also {', '.join(param.aliases)}" if param.aliases else ""
    unit = f"unit {param.unit}" if param.unit else "the root unit"
    return f"{param.path}{aliases}: {_shape(param.shape)} {name_of(param.dtype)}, in {unit}"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{length:,}" for length in shape) or "0-dim"


def _at_rest(param: Param, plan: Plan) -> str:
    """Describe this rank's rows of the parameter, which it holds between steps, with their padding."""
    resting = size(prod(plan.shard_shape(param)) * param.rest_dtype.itemsize)
    place = " in host memory" if plan.rests_on_host(param) else ""
    if not param.sharded:
        return f"all of it on this rank, {resting}{place}"
    rows, count, padded = plan.geometry(param).rows, param.shape[0], plan.geometry(param).padding
    if rows.start == rows.stop:
        return f"no rows of {count:,} on this rank; {resting} of padding{place}"
    padding = f", with {padded} row{'s' * (padded > 1)} of padding" if padded else ""
    padding += f", as {param.frozen_format}" if param.frozen_format else ""
    words = f"row {rows.start:,}" if rows.stop - rows.start == 1 else f"rows {rows.start:,} to {rows.stop - 1:,}"
    return f"{words} of {count:,} on this rank, {resting} of {size(param.rest_bytes)}{padding}{place}"


def _gather_lines(rows: Mapping[str, Row], explanation: Explanation) -> Iterator[str]:
    step, param, plan = explanation.step, explanation.param, explanation.step.traces.plan
    launch, wait, free = rows["gather"], rows["wait"], rows.get("free")
    yield launch.phase
    yield from _code("gather", launch)
    op = step.traces.timeline.ops[launch.ran]
    yield from _part("", f"{_company(launch, explanation)}; {why_launch(step, op)}")
    yield from _code("wait", wait)
    for name in ("first use", "last use", "free"):
        if name in rows:
            yield from _code(name, rows[name], launch)
    why, memory = why_free(step, wait, free, is_read="first use" in rows), ""
    if free is None:
        yield from _part("  free", f"never: {why}")
    else:
        yield from _part("", why)
        most = max(row.unsharded for row in step.all_rows[step.index_of[launch.ran] : step.index_of[free.ran]])
        memory = f"; at most {size(most)} of all gathered parameters are alive meanwhile"
    yield from _part("  memory", f"{size(param.full_bytes)} of its own{memory}")
    condition = ", if an optimizer has changed it since the last gather" if param.resident else ""
    encoding = param.frozen_format or (param.gather_format if plan.gathers_bytes(param) else None)
    yield from _part("  bytes", _traffic(gather_traffic(plan, param), encoding, "to nearest") + condition)
    yield from _time(rows, explanation)


def _gradient_lines(rows: Mapping[str, Row], explanation: Explanation) -> Iterator[str]:
    param, plan = explanation.param, explanation.step.traces.plan
    yield "gradient"
    for name in ("made", "defer", "reduce"):
        if name in rows:
            yield from _code(name, rows[name])
    if "defer" in rows:
        yield from _part("", "no_sync keeps all of it until a later backward")
        return
    made = "as soon as the last of these gradients is made" if rows["reduce"].params[1:] else "as soon as it is made"
    yield from _part("", f"{_company(rows['reduce'], explanation)}; it starts {made}")
    if plan.weighs_gradient(param, plan.reduced_over(param)[0]):
        yield from _part("", f"this rank's part is multiplied by {plan.weight:.4g}, by shares={plan.policy.shares}")
    if "across" in rows:
        yield from _code("across", rows["across"])
        yield from _part("", "its mean inside of this copy is handed on where the next reduction starts")
    yield from _code("wait", rows["wait"])
    yield from _part("", why_wait(explanation.step, rows["wait"]))
    encoded_on = {axis: plan.reduces_bytes(param, axis) for axis in plan.reduced_over(param)}
    encoding = param.reduce_format if encoded_on.get(SHARD) else None
    yield from _part("  bytes", _traffic(reduce_traffic(plan, param), encoding, "at random"))
    if (encoding := param.reduce_format) is not None and encoded_on.get(REPLICATE):
        sent, whole = (reduce_traffic(plan, param, axis).sent for axis in (REPLICATE, SHARD))
        error = f"off by at most {encoding.error('at random')}, and {encoding.error('to nearest')} of the mean"
        yield from _part(
            "", f"{whole:,} B of them inside of this copy, exactly; {sent:,} B between copies, as {encoding}: {error}"
        )
    yield from _time(rows, explanation)


def _traffic(traffic: Traffic, encoding: Format | None, rounds: str) -> str:
    rounding = f", as {encoding}: rounded {rounds}, off by at most {encoding.error(rounds)}" if encoding else ""
    return f"this rank sends {traffic.sent:,} B and receives {traffic.received:,} B of it{rounding}"


def _company(launch: Row, explanation: Explanation) -> str:
    timeline, others = explanation.step.traces.timeline, len(launch.params) - 1
    if not others:
        return "alone"
    bucket, unit = size(timeline.traffic(timeline.ops[launch.ran]).full), explanation.param.unit or "the root unit"
    return f"in a bucket of {bucket} with {others} other{'s' * (others > 1)} of {unit}"


def _time(rows: Mapping[str, Row], explanation: Explanation) -> Iterator[str]:
    if explanation.step.time is None:
        return
    wire, exposed = _times(rows, explanation.step)
    subject = "its bucket" if (rows.get("gather") or rows["reduce"]).params[1:] else "it"
    waits = f"compute waits {duration(exposed)} for {subject}" if exposed else "hidden behind compute"
    yield from _part("  time", f"{duration(wire)} on the wire of {explanation.step.time.device.name}, {waits}")


def _totals(explanation: Explanation) -> str:
    count, exposed, traffic = len(explanation.gathers), explanation.exposed_seconds, explanation.traffic
    times = ["not gathered", "gathered once", "gathered twice"][count] if count < 3 else f"gathered {count} times"
    waits = "" if exposed is None else f"; {duration(exposed)} exposed" if exposed else "; no time exposed"
    return f"{times}; this rank sends {traffic.sent:,} B and receives {traffic.received:,} B for it{waits}"


def _code(name: str, line: Row, previous: Row | None = None) -> Iterator[str]:
    """Yield the text of a trace's line. The phase is included if it differs from the phase of ``previous``."""
    phase = f"  (in {line.phase})" if previous is not None and line.phase != previous.phase else ""
    yield clip(f"  {name:{HANGING - 2}}{line.statement}", WIDTH - len(phase)) + phase


def _part(name: str, text: str) -> Iterator[str]:
    yield from wrap(text, WIDTH, initial_indent=f"{name:{HANGING}}", subsequent_indent=" " * HANGING)


def why_launch(table: Table, op: Op) -> str:
    if isinstance(op, Compute):
        return OF_SLICES[str(op.work)]
    if isinstance(op, Gather):
        return _why_gather(table, op)
    wait = [row for row in table.by_param[op.params[0]] if row.kind == "wait" and row.gradients][-1]
    return f"it starts as soon as its gradients are made; its wait: {why_wait(table, wait)}"


def _why_gather(table: Table, op: Gather) -> str:
    after, bound = table.bounds[op.writes[0]]
    timeline = table.traces.timeline
    sizes, phase = timeline.plan.sizes, "backward" if op.backward else "forward"
    before, count = timeline.ops[after], "one unit" if sizes.prefetch == 1 else f"{sizes.prefetch} units"
    place = "right before backward first reads a bucket that forward gathered"
    if isinstance(before, Wait):
        place = f"right after the wait for {label(before.params, timeline.plan, gradients=False)}"
    return {
        Bound.PHASE: f"it starts with {phase}, so that it ends as soon as it can",
        Bound.USE: f"it starts right before its use: Policy.{'prefetch' if sizes.ahead_bytes else 'in_flight_bytes'}=0",
        Bound.EARLIER: "it starts after the gather before it, whose use comes first, or after the line that writes its "
        "shard",
        Bound.PREFETCH: f"it starts {place}, {count} ahead (Policy.prefetch)",
        Bound.TIMES: f"it starts {place}: by the measured times (Policy.times) it still ends before its use",
        Bound.FIRST: f"it starts {place}: the first gather of {phase} has the wire to itself",
        Bound.IN_FLIGHT: f"it starts {place}: earlier, more than {size(sizes.in_flight_bytes)} would be in flight "
        "(Policy.in_flight_bytes)",
    }[bound]


def why_free(table: Table, wait: Row, free: Row | None, *, is_read: bool) -> str:
    """Return why a parameter is freed in a line, or why it stays gathered if ``free`` is None."""
    if free is None:
        return "it stays in memory"
    if not is_read:
        return "nothing reads it: it is gathered with its bucket"
    if free.phase != wait.phase:
        return "after its last use in backward, which reads what forward gathered"
    gathers = (row for path in free.params for row in table.by_param[path] if row.kind == "gather")
    if any(row.ran > free.ran for row in gathers):
        return "after its last use in this phase; it is gathered again"
    return "after its last use" if free.phase == "backward" else f"after its last use; {_no_backward(table)}"


def why_wait(table: Table, wait: Row) -> str:
    ops, index, reads = table.traces.timeline.ops, wait.ran, table.last_reads
    if index > max(reads.values(), default=-1):
        return "at the end of backward, behind all of its compute"
    if any(reads.get(gradient, -1) > index for gradient in ops[index].writes):
        return "right before the line that reads the reduced gradient"
    limit = size(table.traces.plan.sizes.in_flight_bytes)
    following = next(op for op in islice(ops, index + 1, None) if not isinstance(op, Wait | Free))
    event = "gathers start ahead: with them" if isinstance(following, Gather) else "the next gradient is made: with it"
    return f"before {event}, more than {limit} would be in flight (Policy.in_flight_bytes)"


def _no_backward(table: Table) -> str:
    return "backward does not read it" if table.traces.timeline.ops[-1].backward else "there is no backward"


def _why_replicated(param: Param, plan: Plan) -> str:
    if param.owner is not None:
        return f"rank {param.owner} steps it, since Policy.owned names it"
    least, nbytes = plan.policy.replicate_below_bytes, prod(param.shape) * param.dtype.itemsize
    if not STAGES[plan.policy.stage].sharded:
        return "DDP shards nothing"
    if not cut_rows(param.shape, plan.mesh).is_cut:
        return "it has no rows to cut"
    too_small = f"its {size(nbytes)} are below Policy.replicate_below_bytes={least:,}"
    return too_small if nbytes < least else "Policy.replicated names it"

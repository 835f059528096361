"""``tz.explain``: where a parameter is gathered and why there, when it is freed and reduced."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from thunder_zero import layout
from thunder_zero.compiled import Traces
from thunder_zero.plan import Param, Plan
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.prefetch import Bound, bounds
from thunder_zero.schedule.timeline import Kind, Op, Timeline
from thunder_zero.tools.ask.code_of import code_of
from thunder_zero.tools.ask.explanation import Explanation, Gathered, Line, Reduced
from thunder_zero.tools.ask.reasons import lifetime, why_free, why_launch, why_wait
from thunder_zero.tools.cost.estimate import estimate
from thunder_zero.tools.cost.step_time import Estimate
from thunder_zero.tools.cost.wire import Lane
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.devices.named import device_of
from thunder_zero.zero_module import traces_of

if TYPE_CHECKING:
    from thunder.core.module import ThunderModule

NEAR = 3  # names that an error proposes


def explain(model_or_traces: ThunderModule | Traces, path: str, *, device: Device | str | None = None) -> Explanation:
    """What happens to one parameter in a step; ``print`` it.

    >>> print(tz.explain(traces, "blocks.3.mlp.weight", device="h100"))

    Args:
        model_or_traces: a model with ZeroTransform that was called, or the result of :func:`thunder_zero.trace`.
        path: of the parameter, as in ``module.named_parameters()``; another name of a tied one will do.
        device: as for :func:`thunder_zero.tools.estimate`, for seconds on the wire and exposed seconds.

    Returns:
        This rank's rows; each gather with the lines that launch it, wait for it, read the parameter and free it, why
        they are there, bytes sent and received, memory meanwhile; where its gradient is made, reduced and waited for.

    Raises:
        ValueError: the model has no such parameter, or does not shard it; the device lacks what the step needs.
        TypeError: neither traces nor a model with ZeroTransform; ``device`` is no device.
        RuntimeError: the model was not called yet.
    """
    of = None if device is None else device_of(device)
    traces = model_or_traces if isinstance(model_or_traces, Traces) else traces_of(model_or_traces)
    plan = traces.plan
    _require_parameter(path, traces)
    param = plan.by_name[path]
    facts = _Facts(traces, param, None if of is None else estimate(traces, of))
    gathers, gradient = facts.gathers(), facts.gradient()
    return Explanation(
        param=param,
        plan=plan,
        rows=layout.row_range(param.shape[0], plan.world_size, plan.rank) if param.sharded else None,
        resting_bytes=prod(plan.shard_shape(param)) * param.dtype.itemsize,
        lifetime=lifetime(param, traces.timeline, len(gathers)),
        gathers=gathers,
        gradient=gradient,
        why_no_gradient="" if gradient else _why_no_gradient(param, traces),
        device=None if of is None else of.name,
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
class _Facts:
    """What the timeline says about a parameter."""

    traces: Traces
    param: Param
    estimate: Estimate | None

    @property
    def timeline(self) -> Timeline:
        return self.traces.timeline

    @property
    def plan(self) -> Plan:
        return self.traces.plan

    @cached_property
    def gathered(self) -> tuple[int, ...]:
        return gathered_bytes(self.timeline)

    def gathers(self) -> tuple[Gathered, ...]:
        why = bounds(self.timeline)
        return tuple(
            self._gathered(at, *why[op.writes[0]])
            for at, op in enumerate(self.timeline.ops)
            if op.kind is Kind.GATHER and self.param.path in op.params
        )

    def _gathered(self, at: int, after: int, bound: Bound) -> Gathered:
        timeline, param = self.timeline, self.param
        op = timeline.ops[at]
        wait = self._wait_of(op)
        assert wait is not None
        name = timeline.ops[wait].writes[op.params.index(param.path)]
        free = next((i for i, other in self._after(wait) if other.kind is Kind.FREE and other.reads == (name,)), None)
        readers = self._readers(name, wait)
        first, last = (readers[0], readers[-1]) if readers else (None, None)
        own = layout.owned_numel(param.shape, self.plan.world_size, self.plan.rank) * param.compute_dtype.itemsize
        lines = self._lines(at, wait, first, last, free)
        wire, exposed = self._seconds(at, wait)
        return Gathered(
            bucket=op.params,
            bucket_bytes=timeline.full_bytes(op),
            launch=lines[at],
            why_launch=why_launch(timeline, at, after, bound),
            wait=lines[wait],
            first_read=None if first is None else lines[first],
            last_read=None if last is None else lines[last],
            free=None if free is None else lines[free],
            why_free=why_free(timeline, wait, free, last),
            sent_bytes=self.plan.gather_bytes(param),
            received_bytes=param.full_bytes - own,
            nbytes=param.full_bytes,
            gathered_at_most=max(self.gathered[at : len(timeline.ops) if free is None else free]),
            wire_seconds=wire,
            exposed_seconds=exposed,
        )

    def gradient(self) -> Reduced | None:
        timeline, param, plan = self.timeline, self.param, self.plan
        starts = (Kind.REDUCE, Kind.DEFER)
        at = next((at for at, op in enumerate(timeline.ops) if op.kind in starts and param.path in op.params), None)
        if at is None:
            return None
        op = timeline.ops[at]
        read = op.reads[op.params.index(param.path) if len(op.reads) == len(op.params) else 0]
        made = next((i for i, other in enumerate(timeline.ops[:at]) if read in other.writes), None)
        wait = None if op.kind is Kind.DEFER else self._wait_of(op)
        travels = op.kind is Kind.REDUCE
        sent = plan.reduce_bytes(param) if travels else 0
        lines = self._lines(made, at, wait)
        wire, exposed = (None, None) if wait is None else self._seconds(at, wait)
        return Reduced(
            made=None if made is None else lines[made],
            launch=lines[at],
            wait=None if wait is None else lines[wait],
            why_wait="no_sync keeps all of it until a later backward" if wait is None else why_wait(timeline, wait),
            bucket=op.params,
            bucket_bytes=timeline.full_bytes(op),
            sent_bytes=sent,
            received_bytes=_reduction_receives(param, plan) if travels else 0,
            nbytes=param.grad_bytes,
            wire_seconds=wire,
            exposed_seconds=exposed,
        )

    def _after(self, at: int) -> list[tuple[int, Op]]:
        return list(enumerate(self.timeline.ops))[at + 1 :]

    def _wait_of(self, launch: Op) -> int | None:
        ops = enumerate(self.timeline.ops)
        return next((at for at, op in ops if op.kind is Kind.WAIT and op.reads == launch.writes), None)

    def _readers(self, name: str, wait: int) -> list[int]:
        """Where something computes with a gathered value, or with one derived from it, which may be a view of it."""
        names, readers = {name}, []
        for at, op in self._after(wait)[:-1]:  # the last one is the return, which computes nothing
            if op.kind is Kind.COMPUTE and not names.isdisjoint(op.reads):
                readers.append(at)
                names.update(written for written in op.writes if written in self.timeline.derived)
        return readers

    def _lines(self, *positions: int | None) -> dict[int, Line]:
        found = sorted({at for at in positions if at is not None})
        ops = [self.timeline.ops[at] for at in found]
        codes = code_of(ops, self.traces)
        return {
            at: Line("backward" if op.backward else "forward", op.source[0], code)
            for at, op, code in zip(found, ops, codes, strict=True)
        }

    def _seconds(self, launch: int, wait: int) -> tuple[float | None, float | None]:
        """Of a bucket: on the wires, and those that compute waits for it; without overlap it does at the launch."""
        if self.estimate is None:
            return None, None
        spans = [span for span in self.estimate.spans if span.op in (launch, wait)]
        return (
            sum(span.seconds for span in spans if span.lane is not Lane.COMPUTE),
            sum(span.seconds for span in spans if span.waits),
        )


def _reduction_receives(param: Param, plan: Plan) -> int:
    """Bytes: of a reduce-scatter the own rows of every other rank; an all-reduce receives what it sends."""
    if not param.sharded:
        return plan.reduce_bytes(param)
    own = layout.owned_numel(param.shape, plan.world_size, plan.rank)
    across = layout.all_reduce_sends((own,), plan.replicas)
    return (own * (plan.world_size - 1) + across) * param.reduce_dtype.itemsize

"""Schedules the joint trace before Thunder's fusers, and repairs it after them.

Thunder calls the pass of a fusion executor once, with forward and backward in one lowered trace, before the split. The
first one runs before any fusion: the only moment when a schedule can choose what backward gathers again, and when the
order of lines decides what is fused. Neither of our two executors fuses anything::

    lowered joint trace
        drop_replicas             takes out the synchronises of replicated parameters
        defer_reductions          under no_sync: reductions become zero_defer_reduction
        close_backward            adds zero_wait_offloaded, zero_check_finite, zero_reduce_deferred, where needed
        lift, passes.run, emit    schedules
    Thunder's fusers
        RepairFusion              repairs the schedule
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from thunder_zero.compat.operators import NeverFuses
from thunder_zero.compat.repair_fusion import repair_fusion
from thunder_zero.compat.trace_repairs import fused_only, sort_aliases
from thunder_zero.schedule import passes
from thunder_zero.schedule.recompute import saved_bytes
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import emit, is_joint, lift
from thunder_zero.traces.symbols import ZeroExecutor

from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.extend import FusionExecutor


class JointPass(NeverFuses, FusionExecutor):
    """A fusion executor that passes over the joint trace of one model and fuses nothing."""

    def __init__(self, name: str, executor: ZeroExecutor) -> None:
        super().__init__(name)
        self.executor = executor


class ScheduleJointTrace(JointPass):
    """Decides when each collective of one model starts and ends."""

    def __init__(self, executor: ZeroExecutor) -> None:
        super().__init__("thunder_zero_schedule", executor)
        self.scheduled: TraceCtx | None = None  # the latest joint trace, before fusion

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The joint trace, scheduled by the passes (:mod:`thunder_zero.schedule.passes`)."""
        trace = sort_aliases(drop_replicas(trace, self.executor))
        if not self.executor.program.synced:
            trace = defer_reductions(trace, self.executor)
        trace = close_backward(trace, self.executor)
        lifted = lift(trace, self.executor)
        timeline = passes.run(lifted)
        trained = frozenset(path for path, _ in lifted.gradients)
        self.executor.program = replace(self.executor.program, plan=timeline.plan, trained=trained, lifted=lifted)
        self.scheduled = emit(trace, timeline, self.executor)
        return self.scheduled


class RepairFusion(JointPass):
    """Repairs the schedule after the fusers; the last executor.

    Thunder's rematerialisation may make a fused region of backward recompute from an input of a region of forward, and
    that input may be a gathered parameter. It weighs a tensor by its dtype alone, so it may also make forward save
    more bytes than were scheduled: then the fusers run once more without it, and what saves less is taken.
    """

    def __init__(self, executor: ZeroExecutor, schedule: ScheduleJointTrace, fusers: Sequence[FusionExecutor]) -> None:
        super().__init__("thunder_zero_repair_fusion", executor)
        self.schedule = schedule
        self.fusers = fusers

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The fused joint trace, repaired (:mod:`thunder_zero.compat.repair_fusion`)."""
        scheduled = self.schedule.scheduled
        self.schedule.scheduled = None
        if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
            return trace
        timeline = self._lifted(trace)
        if scheduled is not None and saved_bytes(timeline) > saved_bytes(self._lifted(scheduled)):
            for fuser in self.fusers:
                scheduled = fused_only(fuser, scheduled)
            other = self._lifted(scheduled)
            if saved_bytes(other) < saved_bytes(timeline):
                trace, timeline = scheduled, other
        repaired = repair_fusion(timeline)
        return trace if repaired is timeline else emit(trace, repaired, self.executor)

    def _lifted(self, trace: TraceCtx) -> Timeline:
        return replace(lift(trace, self.executor), plan=self.executor.program.plan)


def drop_replicas(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """The trace without the synchronises of replicated parameters, which every rank has in full."""
    new = from_trace(trace)
    inputs: dict[object, Proxy] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym == executor.synchronize:
            inputs[variableify(bsym.output)] = bsym.args[0]
        else:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(inputs))
    return new


def defer_reductions(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """A lowered joint trace that reduces gradients, as one that defers them::

    p0 = zero_reduce_scatter(grad, 'w')
    t1 = zero_wait(p0)                        ->      t1 = zero_defer_reduction(grad, 'w')
    """
    new = from_trace(trace)
    launches = _reductions(trace, executor)
    with tracectx(new):
        for line in trace.bound_symbols:
            if line.sym == executor.wait and line.args[0].name in launches:
                deferred = executor.defer.bind(*launches[line.args[0].name].args, output=line.output)
                deferred.tags |= line.tags
                new.bound_symbols.append(deferred)
            elif not _is_reduction(line, executor):
                new.bound_symbols.append(line)
    return new


def close_backward(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """The trace with the last lines of a backward that reduces, those that are needed.

    A trace that returns no gradient, as under ``torch.no_grad()``, stays as it is: any line after forward's outputs
    would make Thunder build a backward, and connect the outputs to it.

    - ``wait_offloaded`` waits until gradients have arrived in host memory (``policy.cpu_offload``). It reads all
      of them, so it comes after their waits.
    - ``check_finite`` looks at every reduced gradient (``policy.check_gradients``).
    - ``reduce_deferred`` reduces deferred gradients of parameters that this backward does not reach.
    """
    result = trace.bound_symbols[-1].args[0]
    has_backward = is_joint(result) and any(isinstance(grad, Proxy) for grad in result["output"])
    if not executor.program.synced or not has_backward:
        return trace
    launches = _reductions(trace, executor)
    waits = [line for line in trace.bound_symbols if line.sym == executor.wait and line.args[0].name in launches]
    reduced = {launches[wait.args[0].name].args[1]: wait.output for wait in waits}  # by path
    unreached = tuple(param.path for param in executor.plan.params if param.requires_grad and param.path not in reduced)
    new = from_trace(trace)
    lines: list[BoundSymbol] = []
    with tracectx(new):
        if reduced and executor.plan.policy.cpu_offload:
            lines.append(executor.wait_offloaded.bind(tuple(reduced.values()), output=None))
        if reduced and executor.plan.policy.check_gradients:
            lines.append(executor.check_finite.bind(tuple(reduced.values()), tuple(reduced), output=None))
        if unreached:
            lines.append(executor.reduce_deferred.bind(unreached, output=None))
    for line in lines:
        line.tags.add(BoundSymbolTag.BACKWARD)
    new.bound_symbols = [*trace.bound_symbols[:-1], *lines, trace.bound_symbols[-1]]
    return new


def _reductions(trace: TraceCtx, executor: ZeroExecutor) -> dict[str, BoundSymbol]:
    """The launches of a lowered trace that reduce, by the names of their handles."""
    return {line.output.name: line for line in trace.bound_symbols if _is_reduction(line, executor)}


def _is_reduction(line: BoundSymbol, executor: ZeroExecutor) -> bool:
    return executor.launches.get(line.sym.name) in (executor.all_reduce, executor.reduce_scatter)

"""The executor that schedules: its fusion pass is lift, passes, emit.

Thunder calls a fusion executor's pass once, with forward and backward in one lowered trace, before
any fusion and before the split: the one moment when keep or free is still open, and when order
still decides what fuses with what. It stands first in the list of executors and fuses nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from thunder_zero.schedule import passes
from thunder_zero.schedule.repair_fusion import repair_fusion
from thunder_zero.trace.emit import emit
from thunder_zero.trace.lift import is_joint, lift, proxies_in
from thunder_zero.trace.symbols import ZeroExecutor

from thunder.core.dtypes import float16
from thunder.core.proxies import Proxy, TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.extend import FusionExecutor


class JointPass(FusionExecutor):
    """A fusion executor whose pass over the joint trace of one model fuses nothing."""

    def __init__(self, name: str, executor: ZeroExecutor) -> None:
        super().__init__(name)
        self.executor = executor

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """Never; Thunder would find out by looking at all that a line calls, for every line."""
        return False


class Schedule(JointPass):
    """Decides when every collective of one model starts and ends."""

    def __init__(self, executor: ZeroExecutor) -> None:
        super().__init__("thunder_zero_schedule", executor)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The joint trace with its collectives in the order that the passes decide."""
        trace = drop_replicas(trace, self.executor)
        trace = close_backward(trace, self.executor)
        lifted = lift(trace, self.executor)
        timeline = passes.run(lifted)
        trained = frozenset(path for path, _ in lifted.gradients)
        self.executor.program = replace(self.executor.program, plan=timeline.plan, trained=trained)
        return emit(trace, timeline, self.executor)


class RepairFusion(JointPass):
    """Stands last: looks at what the fusers made of the schedule.

    Thunder's rematerialisation may let a fused region of backward recompute from an input of a
    region of forward, and that input may be a gathered parameter.
    """

    def __init__(self, executor: ZeroExecutor) -> None:
        super().__init__("thunder_zero_repair_fusion", executor)

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The fused joint trace, in which backward reads nothing of forward's gathers that is not kept."""
        if not any(bsym.sym.is_fusion for bsym in trace.bound_symbols):
            return trace
        timeline = replace(lift(trace, self.executor), plan=self.executor.program.plan)
        repaired = repair_fusion(timeline)
        return trace if repaired is timeline else emit(trace, repaired, self.executor)


def drop_replicas(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """Without the synchronises of replicated parameters, which are there in full already."""
    new = from_trace(trace)
    inputs: dict[object, Proxy] = {}
    for bsym in trace.bound_symbols:
        if bsym.sym == executor.synchronize:
            inputs[variableify(bsym.output)] = bsym.args[0]
        else:
            new.bound_symbols.append(bsym.from_bsym_swap_proxies(inputs))
    return new


def close_backward(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """With the lines that stand before the return of a backward that reduces, where they are needed.

    One waits until gradients have arrived in host memory (``policy.cpu_offload``); it reads all of them, so that it
    stands behind their waits. One looks at every reduced gradient (``policy.check_gradients``). One reduces what an
    accumulation deferred of the parameters that this backward does not reach. Where float16 is computed with, one has
    all ranks see an overflow on any, which only the rank that owns the rows would see: ``torch.amp.GradScaler`` then
    skips the step on all.
    """
    if not executor.program.synced or not is_joint(trace.bound_symbols[-1].args[0]):
        return trace
    reduced = _reduced(trace, executor)
    unreached = tuple(param.path for param in executor.plan.params if param.requires_grad and param.path not in reduced)
    new = from_trace(trace)
    lines: list[BoundSymbol] = []
    with tracectx(new):
        if reduced and executor.plan.policy.cpu_offload:
            lines.append(executor.land.bind(tuple(reduced.values()), output=None))
        if reduced and executor.plan.policy.check_gradients:
            lines.append(executor.check_finite.bind(tuple(reduced.values()), tuple(reduced), output=None))
        if unreached:
            lines.append(executor.reduce_deferred.bind(unreached, output=None))
        if reduced and not executor.plan.policy.check_gradients and _computes_in_float16(trace, executor):
            given = (tuple(reduced.values()), _gradients_of_ignored(trace, executor), unreached)
            lines.append(executor.share_overflow.bind(*given, output=None))
    for line in lines:
        line.tags.add(BoundSymbolTag.BACKWARD)
    new.bound_symbols = [*trace.bound_symbols[:-1], *lines, trace.bound_symbols[-1]]
    return new


def _gradients_of_ignored(trace: TraceCtx, executor: ZeroExecutor) -> tuple[Proxy, ...]:
    """What backward returns as gradients of ignored parameters."""
    result = trace.bound_symbols[-1].args[0]
    pairs = zip(result["flat_args"], result["output"], strict=True)
    ignored = executor.program.ignored
    return tuple(
        grad for arg, grad in pairs if isinstance(grad, Proxy) and isinstance(arg, Proxy) and arg.name in ignored
    )


def _computes_in_float16(trace: TraceCtx, executor: ZeroExecutor) -> bool:
    """Whether anything is computed or reduced in float16."""
    if any(param.requires_grad and param.reduce_dtype is torch.float16 for param in executor.plan.params):
        return True
    made = (proxy for bsym in trace.bound_symbols for proxy in proxies_in(bsym.output))
    return any(isinstance(proxy, TensorProxy) and proxy.dtype is float16 for proxy in made)


def _reduced(trace: TraceCtx, executor: ZeroExecutor) -> dict[str, Proxy]:
    """The reduced gradients of a lowered trace, by path."""
    reduced: dict[str, Proxy] = {}
    launched: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if executor.launches.get(bsym.sym.name) in (executor.all_reduce, executor.reduce_scatter):
            launched[bsym.output.name] = bsym.args[1]
        elif bsym.sym == executor.wait and bsym.args[0].name in launched:
            reduced[launched[bsym.args[0].name]] = bsym.output
    return reduced

"""Turns a joint trace into its schedule, and the schedule into the traces that run.

::

    JointTrace      forward and backward in one lowered trace; parameters are rows, with gathers and reductions
      schedule_trace  drop_replicas             removes the synchronises of replicated parameters
                      defer_reductions          under no_sync: replaces reductions by zero_defer_reduction
                      close_backward            adds zero_wait_offloaded, zero_check_finite, zero_reduce_deferred
                      lift, passes.run, emit    reorders the lines
    Scheduled
      compile_program phases                    fuses, splits and frees: :func:`make_phases`, or Thunder
                      prove, add_enter          proves, names the phases for ranks to compare
    Program         forward and backward

:class:`~thunder_zero.traces.symbols.Facts` accompany the lines through all steps. The joint trace comes from
``frontends/dynamo/convert.py``, or from Thunder, whose hooks in ``frontends/program_transform.py`` call the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.schedule import passes, verify
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.insert import add_enter
from thunder_zero.traces.lift import emit, is_joint, lift, lift_phases
from thunder_zero.traces.split import add_frees, split
from thunder_zero.traces.symbols import Facts, ZeroExecutor

from thunder.core.proxies import Proxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import unwrap_return_value

TwoTraces = tuple[TraceCtx, TraceCtx | None]
FORWARD_ALONE = "forward without backward"  # the name of a phase


@dataclass(frozen=True, eq=False)
class JointTrace:
    """A lowered trace of forward, and of backward if there is one, before it is scheduled."""

    trace: TraceCtx
    facts: Facts


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A joint trace in the order of its schedule.

    Attributes:
        trace: the joint trace.
        facts: the facts of its program, with the plan after scheduling.
        lifted: the timeline before the first pass, with the plan before scheduling.
        trained: paths of the parameters that get a gradient.
    """

    trace: TraceCtx
    facts: Facts
    lifted: Timeline
    trained: frozenset[str]


@dataclass(frozen=True, eq=False)
class Program:
    """The proved traces that run; ``backward`` is None if forward runs alone."""

    scheduled: Scheduled
    forward: TraceCtx
    backward: TraceCtx | None

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline of both phases, lifted from the traces lazily."""
        return lift_phases(self.forward, self.backward, self.scheduled.facts)


def schedule_trace(joint: JointTrace) -> Scheduled:
    """Reorder the lines of a joint trace with the passes (:mod:`thunder_zero.schedule.passes`)."""
    facts = joint.facts
    trace = drop_replicas(joint.trace, facts.executor)
    if not facts.synced:
        trace = defer_reductions(trace, facts.executor)
    trace = close_backward(trace, facts)
    lifted = lift(trace, facts)
    names = ("forward", "backward") if is_joint(trace.bound_symbols[-1].args[0]) else (FORWARD_ALONE,)
    with _telling_all_ranks(facts, names):
        timeline = passes.run(lifted)
    trained = frozenset(path for path, _ in lifted.gradients)
    return Scheduled(emit(trace, timeline, facts.executor), replace(facts, plan=timeline.plan), lifted, trained)


def compile_program(scheduled: Scheduled, phases: Callable[[TraceCtx], TwoTraces]) -> Program:
    """Split a scheduled trace into the traces that run, and prove them.

    Args:
        scheduled: the joint trace.
        phases: a function from the joint trace to the forward and the backward trace.

    Raises:
        ScheduleError: the traces break a rule. All ranks raise.
    """
    forward, backward = phases(scheduled.trace)
    prove(scheduled, forward, backward)
    named = [add_enter(trace, phase, scheduled.facts) for phase, trace in phases_by_name(forward, backward).items()]
    return Program(scheduled, named[0], named[1] if backward is not None else None)


def make_phases(trace: TraceCtx) -> TwoTraces:
    """Split a joint trace, if backward computes anything, and free each value after its last use."""
    if is_joint(trace.bound_symbols[-1].args[0]):
        return split(trace)
    return add_frees(unwrap_return_value(trace)), None


def phases_by_name(forward: TraceCtx, backward: TraceCtx | None) -> dict[str, TraceCtx]:
    """Return a mapping from the names of phases to the traces of a program."""
    return {FORWARD_ALONE: forward} if backward is None else {"forward": forward, "backward": backward}


def prove(scheduled: Scheduled, forward: TraceCtx, backward: TraceCtx | None = None) -> None:
    """Prove that the traces that will run are right."""
    facts, phases = scheduled.facts, phases_by_name(forward, backward)
    with _telling_all_ranks(facts, phases):
        timeline = lift_phases(forward, backward, facts)
        if backward is None:
            timeline = replace(timeline, plan=scheduled.lifted.plan)  # forward alone frees everything
        verify.check(timeline, trained=frozenset() if backward is None else scheduled.trained)


@contextmanager
def _telling_all_ranks(facts: Facts, phases: Iterable[str]) -> Iterator[None]:
    """Send an error in the block to the other ranks, which would otherwise wait for this rank's messages."""
    try:
        yield
    except Exception as error:  # a user's pass may raise anything
        if (facts.synced and "backward" in phases) or any(param.sharded for param in facts.plan.params):
            facts.executor.runtime.tell_failure(error)  # otherwise no rank waits for this one
        raise


def drop_replicas(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """Return the trace without the synchronises of replicated parameters, which every rank has in full."""
    new = from_trace(trace)
    inputs: dict[object, Proxy] = {}
    for line in trace.bound_symbols:
        if line.sym == executor.synchronize:
            inputs[variableify(line.output)] = line.args[0]
        else:
            new.bound_symbols.append(line.from_bsym_swap_proxies(inputs))
    return new


def defer_reductions(trace: TraceCtx, executor: ZeroExecutor) -> TraceCtx:
    """Return a lowered joint trace that defers gradients instead of reducing them::

    p0 = zero_reduce_scatter(grad, 'w')
    t1 = zero_wait(p0)                        ->      t1 = zero_defer_reduction(grad, 'w')
    """
    new = from_trace(trace)
    reductions = _reductions(trace, executor)
    with tracectx(new):
        for index, line in enumerate(trace.bound_symbols):
            if (launch := reductions.ended.get(index)) is not None:
                deferred = executor.defer.bind(*launch.args[:2], output=line.output)
                deferred.tags |= line.tags
                new.bound_symbols.append(deferred)
            elif index not in reductions.lines:
                new.bound_symbols.append(line)
    return new


def close_backward(trace: TraceCtx, facts: Facts) -> TraceCtx:
    """Append the last lines that a backward with reductions needs; return the trace.

    A trace that returns no gradient, as under ``torch.no_grad()``, is returned unchanged: any line after forward's
    outputs would make Thunder build a backward, and connect the outputs to it.

    - ``wait_offloaded`` waits until gradients have arrived in host memory (``policy.cpu_offload``). This line reads all
      gradients, so it comes after their waits.
    - ``check_finite`` checks every reduced gradient (``policy.check_gradients``).
    - ``reduce_deferred`` reduces the deferred gradients of parameters that this backward does not reach. A graph
      without parameters has no such line, since it may run on one rank alone.
    """
    result = trace.bound_symbols[-1].args[0]
    has_backward = is_joint(result) and any(isinstance(grad, Proxy) for grad in result["output"])
    if not facts.synced or not has_backward:
        return trace
    executor, plan = facts.executor, facts.plan
    ended = _reductions(trace, executor).ended
    reduced = {launch.args[1]: trace.bound_symbols[index].output for index, launch in ended.items()}  # by path
    unreached = tuple(param.path for param in plan.params if param.requires_grad and param.path not in reduced)
    new = from_trace(trace)
    lines: list[BoundSymbol] = []
    with tracectx(new):
        if reduced and plan.policy.cpu_offload:
            lines.append(executor.wait_offloaded.bind(tuple(reduced.values()), output=None))
        if reduced and plan.policy.check_gradients:
            lines.append(executor.check_finite.bind(tuple(reduced.values()), tuple(reduced), output=None))
        if unreached and facts.inputs:
            lines.append(executor.reduce_deferred.bind(unreached, output=None))
    for line in lines:
        line.tags.add(BoundSymbolTag.BACKWARD)
    new.bound_symbols = [*trace.bound_symbols[:-1], *lines, trace.bound_symbols[-1]]
    return new


@dataclass(frozen=True, slots=True)
class _Reductions:
    """The reductions of a lowered trace. A reduction runs over one axis, or over several axes in turn.

    Attributes:
        ended: a mapping from the index of a reduction's last wait to its first launch.
        lines: the indices of all lines of reductions.
    """

    ended: dict[int, BoundSymbol]
    lines: frozenset[int]


def _reductions(trace: TraceCtx, executor: ZeroExecutor) -> _Reductions:
    ended: dict[int, BoundSymbol] = {}
    first: dict[str, BoundSymbol] = {}  # handle or mean -> the first launch of its reduction
    waits: dict[str, int] = {}  # mean -> the index of its wait
    lines: set[int] = set()
    for index, line in enumerate(trace.bound_symbols):
        read = line.args[0].name if line.args and isinstance(line.args[0], Proxy) else ""
        if executor.launches.get(line.sym.name) in (executor.all_reduce, executor.reduce_scatter):
            first[line.output.name] = first.get(read, line)
            ended.pop(waits.get(read, -1), None)  # the reduction continues over another axis
        elif line.sym == executor.wait and read in first:
            first[line.output.name] = ended[index] = first[read]
            waits[line.output.name] = index
        else:
            continue
        lines.add(index)
    return _Reductions(ended, frozenset(lines))

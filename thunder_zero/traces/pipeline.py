"""Turns a joint trace into its schedule, and the schedule into the traces that run.

::

    JointTrace      forward and backward in one trace of the plain module: full parameters in, full gradients out
      insert_synchronize, insert_reductions     parameters become rows, gradients become means (``insert.py``)
      lower           writes launches and waits, or under no_sync deferred reductions (``lower.py``)
      schedule_trace  lift, passes.run, emit    reorders the lines
    Scheduled
      compile_program phases                    fuses, splits and frees (:func:`make_phases`)
                      prove, add_enter          proves, names the phases for ranks to compare
    Program         forward and backward

:class:`~thunder_zero.traces.symbols.Facts` accompany the lines through all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from thunder_zero.schedule import passes, verify
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.enter import add_enter
from thunder_zero.traces.insert import insert_reductions, insert_synchronize
from thunder_zero.traces.lift import emit, is_joint, lift, lift_phases
from thunder_zero.traces.lower import lower
from thunder_zero.traces.split import add_frees, split
from thunder_zero.traces.symbols import Facts, JointTrace

from thunder.core.trace import TraceCtx
from thunder.core.transform_common import unwrap_return_value

TwoTraces = tuple[TraceCtx, TraceCtx | None]
FORWARD_ALONE = "forward without backward"  # the name of a phase


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


TRANSFORMS = (insert_synchronize, insert_reductions, lower)


def shard(plain: JointTrace) -> list[JointTrace]:
    """Return the trace of the plain module, and the trace after each of ``TRANSFORMS``."""
    return list(accumulate(TRANSFORMS, lambda joint, transform: transform(joint), initial=plain))


def schedule_trace(lowered: JointTrace) -> Scheduled:
    """Reorder the lines of a lowered trace with the passes (:mod:`thunder_zero.schedule.passes`)."""
    facts, trace = lowered.facts, lowered.trace
    lifted = lift(trace, facts)
    names = ("forward", "backward") if is_joint(trace.bound_symbols[-1].args[0]) else (FORWARD_ALONE,)
    with telling_all_ranks(facts, names):
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
    with telling_all_ranks(facts, phases):
        timeline = lift_phases(forward, backward, facts)
        if backward is None:
            timeline = replace(timeline, plan=scheduled.lifted.plan)  # forward alone frees everything
        verify.check(timeline, trained=frozenset() if backward is None else scheduled.trained)


@contextmanager
def telling_all_ranks(facts: Facts, phases: Iterable[str]) -> Iterator[None]:
    """Send an error in the block to the other ranks, which would otherwise wait for this rank's messages."""
    try:
        yield
    except Exception as error:  # a user's pass may raise anything
        if (facts.synced and "backward" in phases) or any(param.sharded for param in facts.plan.params):
            facts.executor.runtime.tell_failure(error)  # otherwise no rank waits for this one
        raise

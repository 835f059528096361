"""Turns a joint trace into its schedule, and the schedule into the traces that run.

::

    JointTrace      forward and backward in one trace of the plain module: full parameters in, full gradients out
      insert_synchronize, insert_reductions     parameters become rows, gradients become means (``insert.py``)
      lower           writes launches and waits (``lower.py``)
    lowered
      schedule        lifts the lines into operations, once; the passes reorder them, and are proved
    Scheduled
      write_program   last lines, fused regions, frees; the proof; each operation is written (``write.py``)
    Traces          forward and backward

:class:`~thunder_zero.traces.symbols.Facts` accompany the lines through all steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

from thunder_zero.schedule import passes, verify
from thunder_zero.schedule.free import free
from thunder_zero.schedule.ops import Return
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.compiled import Scheduled, Traces
from thunder_zero.traces.fuse import fuse
from thunder_zero.traces.insert import insert_reductions, insert_synchronize
from thunder_zero.traces.lift import computation, lift
from thunder_zero.traces.lower import lower
from thunder_zero.traces.missing_tangents import drop_tangents
from thunder_zero.traces.symbols import Facts, JointTrace
from thunder_zero.traces.write import Writer, Written

from thunder.common import CompileData
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.symbol import BoundSymbol

TRANSFORMS = (insert_synchronize, insert_reductions, lower)


def shard(plain: JointTrace) -> list[JointTrace]:
    """Return the trace of the plain module, and the trace after each of ``TRANSFORMS``."""
    return list(accumulate(TRANSFORMS, lambda joint, transform: transform(joint), initial=plain))


def schedule(lowered: JointTrace) -> Scheduled:
    """Lift a lowered trace, and run the passes (:mod:`thunder_zero.schedule.passes`)."""
    timeline = lifted(lowered)
    with telling_all_ranks(lowered.facts, timeline):
        return Scheduled(lowered, timeline, passes.run(timeline))


def write_program(scheduled: Scheduled, *, fuses: bool) -> Traces:
    """Finish the operations of a schedule, prove them, and write the traces that run."""
    writer = Writer(scheduled.lowered)
    timeline = _proved(_unproved(scheduled.timeline, writer, fuses=fuses), writer)
    forward = writer.forward(timeline)
    has_backward = timeline.backward_start < len(timeline.ops)
    backward = writer.backward(timeline) if has_backward else Written(None, ())
    lines = forward.lines + backward.lines
    return Traces(forward.trace, backward.trace, timeline, lines, scheduled, fuses, without_tangents)


def without_tangents(traces: Traces, missing: Collection[str]) -> Traces:
    """Return a program with an equal forward, whose backward does not take the tangents that ``missing`` names."""
    writer, start = Writer(traces.scheduled.lowered), traces.timeline.backward_start
    with thunder_context():
        timeline = _pruned(traces.scheduled.timeline, traces.timeline, missing, writer)
        timeline = _proved(_unproved(timeline, writer, fuses=traces.fuses), writer)
        phase = writer.backward(timeline)
    return replace(traces, timeline=timeline, backward=phase.trace, lines=(*traces.lines[:start], *phase.lines))


def lifted(lowered: JointTrace) -> Timeline:
    """Return the operations of a lowered trace, before the first pass."""
    return lift(lowered) if lowered.facts.synced else passes.defer(lift(lowered))


def outlined(lowered: JointTrace, lifted: Timeline, missing: Collection[str] = (), *, fuses: bool) -> Traces:
    """Return a program that is neither proved nor written: its traces only take arguments and return results.

    Backward does not take ``missing`` tangents.
    """
    writer = Writer(lowered)
    with thunder_context():
        ordered = passes.apply_passes(lifted, (*passes.PASSES, *lifted.plan.policy.passes))
        timeline = _unproved(ordered, writer, fuses=fuses)
        if missing:
            timeline = _unproved(_pruned(ordered, timeline, missing, writer), writer, fuses=fuses)
        ends = timeline.with_ops(op for op in timeline.ops if isinstance(op, Return))
        forward, backward = writer.forward(ends), writer.backward(ends) if len(ends.ops) > 1 else Written(None, ())

    def without_tangents(traces: Traces, missing: Collection[str]) -> Traces:
        other = outlined(lowered, lifted, missing, fuses=fuses)
        return replace(other, restored=traces.restored, others=traces.others)

    scheduled = Scheduled(lowered, lifted, ordered)
    return Traces(forward.trace, backward.trace, timeline, (), scheduled, fuses, without_tangents)


def _pruned(scheduled: Timeline, timeline: Timeline, missing: Collection[str], writer: Writer) -> Timeline:
    """Return the forward of ``timeline``, and the backward of ``scheduled`` without these tangents."""
    pruned = drop_tangents(scheduled, missing, writer)
    backward = (op for op in pruned.ops if op.backward)
    return pruned.with_ops([*timeline.ops[: timeline.backward_start], *backward], timeline.values)


def thunder_context() -> Any:
    """Return Thunder's context of a compilation, with default options. It needs some function."""
    return compile_data_and_stats(CompileData(fn=lambda: None, disable_preprocessing=True), None)


def _unproved(timeline: Timeline, writer: Writer, *, fuses: bool) -> Timeline:
    """Return the operations of the traces that run: with the last lines, regions and frees."""
    timeline = _with_last_lines(timeline, writer)
    return free(fuse(timeline, writer) if fuses else timeline)


def _proved(timeline: Timeline, writer: Writer) -> Timeline:
    with telling_all_ranks(writer.facts, timeline):
        verify.check(timeline, trained=[path for path, _ in timeline.gradients])
    return timeline


def _with_last_lines(timeline: Timeline, writer: Writer) -> Timeline:
    """Return the timeline with the lines that end a backward with reductions, before its return.

    - ``zero_wait_offloaded`` waits until gradients have arrived in host memory (``policy.cpu_offload``).
    - ``zero_check_finite`` checks every reduced gradient (``policy.check_gradients``).
    - ``zero_reduce_deferred`` reduces, at the end of backward, the deferred gradients of parameters that no graph
      reaches. It lists those that this graph misses. A graph without parameters lacks it, since it may run on one rank.
    """
    *ops, end = timeline.ops
    if not writer.facts.synced or not (isinstance(end, Return) and end.backward):
        return timeline
    return timeline.with_ops([*ops, *(computation(line, backward=True) for line in _last_lines(timeline, writer)), end])


def _last_lines(timeline: Timeline, writer: Writer) -> Iterator[BoundSymbol]:
    executor, plan = writer.facts.executor, timeline.plan
    gradients = sorted(timeline.gradients, key=lambda gradient: timeline.writer[gradient[1]])  # as backward makes them
    paths, means = tuple(path for path, _ in gradients), tuple(writer.proxies[name] for _, name in gradients)
    if means and plan.policy.cpu_offload:
        yield executor.effect("zero_wait_offloaded").bind(means, output=None)
    if means and plan.policy.check_gradients:
        yield executor.effect("zero_check_finite").bind(means, paths, output=None)
    unreached = tuple(param.path for param in plan.params if param.requires_grad and param.path not in paths)
    if unreached and writer.facts.inputs:
        yield executor.effect("zero_reduce_deferred").bind(unreached, output=None)


@contextmanager
def telling_all_ranks(facts: Facts, timeline: Timeline) -> Iterator[None]:
    """Send an error in the block to the other ranks, which would otherwise wait for this rank's messages."""
    try:
        yield
    except Exception as error:  # a user's pass may raise anything
        has_backward = timeline.backward_start < len(timeline.ops)
        if (facts.synced and has_backward) or any(param.sharded for param in timeline.plan.params):
            facts.executor.runtime.tell_failure(error)  # otherwise no rank waits for this one
        raise

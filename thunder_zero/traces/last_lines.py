"""Adds the lines that a backward with reductions ends with, before its return.

- ``zero_wait_offloaded`` waits until gradients have arrived in host memory (``policy.cpu_offload``).
- ``zero_check_finite`` checks every reduced gradient (``policy.check_gradients``).
- ``zero_reduce_deferred`` reduces, at the end of backward, the deferred gradients of parameters that no graph reaches.
  It lists those that this graph misses. A graph without parameters lacks it, since it may run on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from thunder_zero.schedule.ops import Return
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.lift import computation
from thunder_zero.traces.write import Writer

from thunder.core.symbol import BoundSymbol


def add_last_lines(timeline: Timeline, writer: Writer) -> Timeline:
    """Return the timeline with the lines that end backward; unchanged if nothing is reduced."""
    *ops, end = timeline.ops
    if not writer.facts.synced or not (isinstance(end, Return) and end.backward):
        return timeline
    return timeline.with_ops([*ops, *(computation(line, backward=True) for line in _lines(timeline, writer)), end])


def _lines(timeline: Timeline, writer: Writer) -> Iterator[BoundSymbol]:
    executor, plan = writer.facts.executor, timeline.plan
    gradients = sorted(timeline.gradients, key=lambda gradient: timeline.writer[gradient[1]])  # as backward makes them
    paths, means = tuple(path for path, _ in gradients), tuple(writer.proxies[name] for _, name in gradients)
    if means and plan.policy.cpu_offload:
        yield executor.wait_offloaded.bind(means, output=None)
    if means and plan.policy.check_gradients:
        yield executor.check_finite.bind(means, paths, output=None)
    unreached = tuple(param.path for param in plan.params if param.requires_grad and param.path not in paths)
    if unreached and writer.facts.inputs:
        yield executor.reduce_deferred.bind(unreached, output=None)

"""Writes the lines that gather parameters and reduce gradients, in a transform from trace to trace.

::

    w = zero_synchronize(t_w, 'w')              p0 = zero_all_gather(t_w, 'w')
                                         ->     w = zero_wait(p0)
    t_w_grad = zero_reduce(w_grad, 'w')         p1 = zero_reduce_scatter(w_grad, 'w')
                                                t_w_grad = zero_wait(p1)

A replicated parameter is only cast (``zero_cast``), and its gradient all-reduced. A reduction may run over several axes
of the mesh in turn. Under ``no_sync`` a reduction is deferred (``zero_defer_reduction``). The lines that a backward
with reductions ends with are added:

- ``zero_wait_offloaded`` waits until gradients have arrived in host memory (``policy.cpu_offload``). It reads all
  gradients, so it comes after their waits.
- ``zero_check_finite`` checks every reduced gradient (``policy.check_gradients``).
- ``zero_reduce_deferred`` reduces, at the end of backward, the deferred gradients of parameters that no graph reaches.
  It lists those that this graph misses. A graph without parameters lacks it, since it may run on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thunder_zero.traces.lift import is_joint
from thunder_zero.traces.symbols import Facts, JointTrace

from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceProvenance, from_trace, tracectx


def lower(joint: JointTrace) -> JointTrace:
    """Return the trace with launches and waits in place of synchronises and reductions."""
    facts, (*lines, end) = joint.facts, joint.trace.bound_symbols
    executor = facts.executor
    trace = from_trace(joint.trace)
    trace.names = set(trace.names)
    means: dict[str, Proxy] = {}  # path: the mean of the gradient
    with tracectx(trace):
        for line in lines:
            if line.sym == executor.synchronize:
                trace.bound_symbols += executor.gathers(line.args[0], line.args[1], line.output)
            elif line.sym == executor.reduce and facts.synced:
                means[line.args[1]] = line.output
                trace.bound_symbols += executor.reductions(line.args[0], line.args[1], line.output)
            elif line.sym == executor.reduce:
                trace.bound_symbols.append(executor.defer.bind(*line.args, output=line.output))
            else:
                trace.bound_symbols.append(line)
        if facts.synced and is_joint(end.args[0]) and any(isinstance(grad, Proxy) for grad in end.args[0]["output"]):
            for line in _last_lines(means, facts):
                line.tags.add(BoundSymbolTag.BACKWARD)
                trace.bound_symbols.append(line)
    trace.bound_symbols.append(end)
    trace.set_provenance(TraceProvenance("Lower to collectives (thunder_zero)"))
    return JointTrace(trace, facts)


def _last_lines(means: Mapping[str, Proxy], facts: Facts) -> Iterator[BoundSymbol]:
    """Yield the lines that end a backward with reductions."""
    executor, plan = facts.executor, facts.plan
    if means and plan.policy.cpu_offload:
        yield executor.wait_offloaded.bind(tuple(means.values()), output=None)
    if means and plan.policy.check_gradients:
        yield executor.check_finite.bind(tuple(means.values()), tuple(means), output=None)
    unreached = tuple(param.path for param in plan.params if param.requires_grad and param.path not in means)
    if unreached and facts.inputs:
        yield executor.reduce_deferred.bind(unreached, output=None)

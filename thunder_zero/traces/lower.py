"""Writes the lines that gather parameters and reduce gradients, in a transform from trace to trace.

::

    w = zero_synchronize(t_w, 'w')              p0 = zero_all_gather(t_w, 'w')
                                         ->     w = zero_wait(p0)
    t_w_grad = zero_reduce(w_grad, 'w')         p1 = zero_reduce_scatter(w_grad, 'w')
                                                t_w_grad = zero_wait(p1)

A replicated parameter is only cast (``zero_cast``), and its gradient all-reduced. A reduction may run over several axes
of the mesh in turn.
"""

from __future__ import annotations

from thunder_zero.traces.symbols import JointTrace

from thunder.core.trace import TraceProvenance, from_trace, tracectx


def lower(joint: JointTrace) -> JointTrace:
    """Return the trace with launches and waits in place of synchronises and reductions."""
    facts, executor = joint.facts, joint.facts.executor
    trace = from_trace(joint.trace)
    trace.names = set(trace.names)
    with tracectx(trace):
        for line in joint.trace.bound_symbols:
            if line.sym == executor.synchronize:
                trace.bound_symbols += executor.gathers(line.args[0], line.args[1], line.output)
            elif line.sym == executor.reduce:
                trace.bound_symbols += executor.reductions(line.args[0], line.args[1], line.output)
            else:
                trace.bound_symbols.append(line)
    trace.set_provenance(TraceProvenance("Lower to collectives (thunder_zero)"))
    return JointTrace(trace, facts)

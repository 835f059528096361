"""Traces: the traces of a compiled program and their timeline, for users and reports.

Traces are the result of ``tz.traces_of`` and ``tz.trace``, for printing, reports and forecasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thunder_zero.plan.amounts import size
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.timeline import Timeline

from thunder.core.trace import TraceCtx


@dataclass(frozen=True, repr=False)
class Traces:
    """The program for one kind of input: the traces of forward and backward, their timeline and the plan.

    ``str`` gives a summary. :func:`thunder_zero.print_trace` prints all lines::

        Traces: ZeRO-3, rank 0 of 2, 12 parameters in 3 units, gradients are reduced
          forward: 61 lines, 3 gathers, 0 reductions, 12.3 KB sent
          backward: 140 lines, 2 gathers, 3 reductions, 20.5 KB sent

    Attributes:
        forward: the forward trace, as it runs.
        backward: the backward trace; None if nothing needs a gradient.
        timeline: operations of forward, then of backward, from which the traces are written.
        lines: for each operation, the positions of its lines in its phase's trace: the line that runs it first, then a
            line that encodes or decodes. A launch that encodes comes after the FREE of what it encodes.
        plan: a ``Param`` for each parameter, keyed by path.
        synced: True if gradients are reduced, False if they are deferred (``no_sync``).
        sizes: the shapes of tensor inputs, keyed by name. A dynamic size is the name of the input that holds the
            number.
        others: a mapping from inputs that are buffers or ignored parameters to their paths.
        restored: a function that builds the model's result from the forward trace's outputs. None if it is unknown.
        without: a function that takes names of output gradients, and returns traces whose backward does not read these
            gradients.
        lifted: the timeline before scheduling.
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    lines: Sequence[Sequence[int]]
    plan: Plan
    synced: bool
    sizes: Mapping[str, tuple[int | str, ...]]
    others: Mapping[str, str]
    restored: Callable[[Sequence[Any]], Any] | None
    without: Callable[[Sequence[str]], Traces]
    lifted: Timeline

    def __repr__(self) -> str:
        plan, stage = self.plan, STAGES[self.plan.policy.stage].name
        gradients = "reduced" if self.synced else "deferred"
        head = (
            f"Traces: {stage}, {plan.mesh}, {len(plan.params)} parameters in "
            f"{len(plan.units)} units, gradients are {gradients}"
        )
        phases = ("forward", self.forward, self.forward_timeline), ("backward", self.backward, self.backward_timeline)
        summaries = (_summary(name, trace, timeline) for name, trace, timeline in phases if trace is not None)
        return "\n".join([head, *summaries])

    @property
    def forward_timeline(self) -> Timeline:
        """The forward phase."""
        return self.timeline.with_ops(op for op in self.timeline.ops if not op.backward)

    @property
    def backward_timeline(self) -> Timeline:
        """The backward phase, which is empty if there is no backward."""
        return self.timeline.with_ops(op for op in self.timeline.ops if op.backward)


def _summary(phase: str, trace: TraceCtx, timeline: Timeline) -> str:
    kinds = Counter(op.kind for op in timeline.ops)
    return (
        f"  {phase}: {len(trace.bound_symbols)} lines, {kinds['gather']} gathers, {kinds['reduce']} reductions, "
        f"{size(sum(timeline.traffic(op).sent for op in timeline.ops))} sent"
    )

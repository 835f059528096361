"""Traces: the traces of a compiled program and their timeline, for users and reports.

Traces are the result of ``tz.traces_of`` and ``tz.trace``, for printing, reports and forecasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_zero.plan.amounts import size
from thunder_zero.plan.outer import Outer
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.traces.symbols import Facts, JointTrace

from thunder.core.trace import TraceCtx


@dataclass(frozen=True, eq=False)
class Scheduled:
    """The operations of a lowered trace, scheduled and proved."""

    lowered: JointTrace  # the trace
    lifted: Timeline  # its operations before the first pass, with the plan before scheduling
    timeline: Timeline  # its operations after the last pass, with the plan after scheduling


@dataclass(frozen=True, repr=False)
class Traces:
    """A program: the proved traces of forward and backward that run, and their timeline.

    ``str`` gives a summary. :func:`thunder_zero.print_trace` prints all lines::

        Traces: ZeRO-3, rank 0 of 2, 12 parameters in 3 units, gradients are reduced
          forward: 61 lines, 3 gathers, 0 reductions, 12.3 KB sent
          backward: 140 lines, 2 gathers, 3 reductions, 20.5 KB sent

    Attributes:
        lines: for each operation, the positions of its lines in its phase's trace: the line that runs it first, then a
            line that encodes or decodes. A launch that encodes comes after the FREE of what it encodes.
        fuses: True if inductor compiles the regions between lines of the schedule.
        restored: a function that builds the model's result from the forward trace's outputs. None if it is unknown.
        others: a mapping from inputs that are buffers or ignored parameters to their paths.
        outer: the outer step between sites. None if there is none.
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    lines: Sequence[Sequence[int]]
    scheduled: Scheduled
    fuses: bool
    without_tangents: Callable[[Traces, Sequence[str]], Traces]
    restored: Callable[[Sequence[Any]], Any] | None = None
    others: Mapping[str, str] = field(default_factory=dict)
    outer: Outer | None = None

    @property
    def facts(self) -> Facts:
        """What the lines of the traces do not contain."""
        return self.scheduled.lowered.facts

    @property
    def lifted(self) -> Timeline:
        """The timeline before scheduling."""
        return self.scheduled.lifted

    @property
    def exchanges(self) -> Outer | None:
        """The outer step, if sites exchange after a step of this program: if it has a backward that reduces."""
        return self.outer if self.backward is not None and self.facts.synced else None

    @property
    def plan(self) -> Plan:
        """The plan that the operations follow."""
        return self.timeline.plan

    def without(self, tangents: Sequence[str]) -> Traces:
        """Return the traces whose backward does not read these gradients of outputs."""
        return self.without_tangents(self, tangents)

    def __repr__(self) -> str:
        plan, stage = self.plan, STAGES[self.plan.policy.stage].name
        gradients = "reduced" if self.facts.synced else "deferred"
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

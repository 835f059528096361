"""What a model runs: its traces with the timeline that is read off them, by Thunder's cache entry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from thunder_zero.plan import Plan
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.trace.lift import lift_halves
from thunder_zero.trace.program import Program
from thunder_zero.trace.symbols import ZeroExecutor

from thunder.core.trace import TraceCtx


@dataclass(frozen=True)
class Traces:
    """What runs for one kind of input: both traces, their timeline and the plan.

    Attributes:
        forward: the forward trace, as it runs.
        backward: the backward trace, or None where nothing needs a gradient.
        timeline: both halves, forward first; ``Op.source`` counts the lines of its half's trace.
        plan: what each parameter is.
        synced: gradients are reduced; otherwise that is deferred (``no_sync``).
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    plan: Plan
    synced: bool = True

    @property
    def forward_timeline(self) -> Timeline:
        """The forward half."""
        return self.timeline.with_ops(op for op in self.timeline.ops if not op.backward)

    @property
    def backward_timeline(self) -> Timeline:
        """The backward half; empty where there is no backward."""
        return self.timeline.with_ops(op for op in self.timeline.ops if op.backward)


@dataclass(frozen=True)
class Compiled:
    """What was compiled of one model.

    Attributes:
        executor: its symbols.
        programs: what each compilation found out, by forward trace.
    """

    executor: ZeroExecutor
    programs: WeakKeyDictionary[TraceCtx, Program] = field(default_factory=WeakKeyDictionary)

    def traces(self, entry: Any) -> Traces:
        """What an entry of Thunder's cache runs, with the timeline that is read off it."""
        forward = entry.computation_traces[-1]
        backward = entry.backward_traces[-1] if entry.backward_traces else None
        program = self.program_of(entry)
        timeline = lift_halves(forward, backward, self.executor, program)
        return Traces(forward, backward, timeline, program.plan, program.synced)

    def program_of(self, entry: Any) -> Program:
        """What was found out when an entry of Thunder's cache was compiled."""
        return next(self.programs[trace] for trace in entry.computation_traces if trace in self.programs)

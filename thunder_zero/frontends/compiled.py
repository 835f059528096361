"""Traces: the traces of a compiled program and their timeline, for users and reports.

In: a program of ``traces/pipeline.py``. Out: :class:`Traces`, the result of ``tz.traces_of`` and ``tz.trace``, for
printing, reports and forecasts. The timeline is lifted lazily, once, from the traces that run.
``Traces.lifted`` is the timeline before the passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thunder_zero.notebook import curve, small
from thunder_zero.plan.amounts import size
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Timeline
from thunder_zero.traces.pipeline import Program

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
        timeline: operations of forward, then of backward. ``Op.source`` is the index of a line in its phase's trace.
        plan: a ``Param`` for each parameter, keyed by path.
        synced: True if gradients are reduced, False if they are deferred (``no_sync``).
        sizes: the shapes of tensor inputs, keyed by name. A dynamic size is the name of the input that holds the
            number. Empty under ``thunder.jit``.
        others: a mapping from inputs that are buffers or ignored parameters to their paths.
        epilogue: Thunder's trace that builds the model's result from the forward trace's outputs.
        restored: a function that builds the model's result from the forward trace's outputs. None under
            ``thunder.jit``.
        without: a function that takes names of output gradients, and returns traces whose backward does not read these
            gradients. None if backward gets zeros for missing gradients.
        lifted: the timeline before scheduling.
        fuses: True if the model's executors fuse pointwise lines on a GPU, as Thunder's default executors do.
    """

    forward: TraceCtx
    backward: TraceCtx | None
    timeline: Timeline
    plan: Plan
    synced: bool = True
    sizes: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    epilogue: TraceCtx | None = None
    restored: Callable[[Sequence[Any]], Any] | None = field(default=None, repr=False)
    without: Callable[[Sequence[str]], Traces] | None = field(default=None, repr=False)
    lifted: Timeline | None = None
    fuses: bool = False

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

    @classmethod
    def of(cls, program: Program, **other_fields: Any) -> Traces:
        """Return the traces of a program, with ``other_fields`` as the remaining fields."""
        scheduled, facts = program.scheduled, program.scheduled.facts
        values = {
            "synced": facts.synced,
            "sizes": facts.sizes,
            "others": facts.others,
            "lifted": scheduled.lifted,
            **other_fields,
        }
        return cls(program.forward, program.backward, program.timeline, facts.plan, **values)

    @property
    def has_regions(self) -> bool:
        """True if a fuser has merged lines into regions."""
        lines = (line for phase in (self.forward, self.backward) if phase for line in phase.bound_symbols)
        return any(line.sym.is_fusion for line in lines)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: what a step sends, and the curve of gathered bytes."""
        timeline, plan = self.timeline, self.plan
        gathered = gathered_bytes(timeline)
        counts = {kind: sum(op.kind is kind for op in timeline.ops) for kind in LAUNCHES}
        facts = {
            "gathers": str(counts[Kind.GATHER]),
            "reductions": str(counts[Kind.REDUCE]),
            "sent by this rank": size(sum(map(timeline.bytes_sent, timeline.ops))),
            "gathered at most": size(max(gathered, default=0)),
        }
        title = f"{STAGES[plan.policy.stage].name}, {plan.mesh}"
        return small(title, facts, curve(gathered, "bytes of gathered parameters, operation by operation"))

    @property
    def forward_timeline(self) -> Timeline:
        """The forward phase."""
        return self.timeline.with_ops(op for op in self.timeline.ops if not op.backward)

    @property
    def backward_timeline(self) -> Timeline:
        """The backward phase, which is empty if there is no backward."""
        return self.timeline.with_ops(op for op in self.timeline.ops if op.backward)


@dataclass(frozen=True, eq=False)
class Entry:
    """A compiled program of a model.

    Attributes:
        synced: True if the program reduces gradients.
        computation_fn: the function of forward.
        traces: a function that returns the traces of the last run.
    """

    synced: bool
    computation_fn: Callable[..., Any]
    traces: Callable[[], Traces]


def _summary(phase: str, trace: TraceCtx, timeline: Timeline) -> str:
    kinds = Counter(op.kind for op in timeline.ops)
    return (
        f"  {phase}: {len(trace.bound_symbols)} lines, {kinds[Kind.GATHER]} gathers, {kinds[Kind.REDUCE]} reductions, "
        f"{size(sum(map(timeline.bytes_sent, timeline.ops)))} sent"
    )

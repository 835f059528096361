"""The facts about one program that Thunder compiled, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thunder_zero.plan import Plan
from thunder_zero.schedule.timeline import Timeline


@dataclass(frozen=True)
class Program:
    """The facts about the compilation for one kind of input.

    Attributes:
        plan: the plan of each parameter; the schedule adds the parameters that are gathered once.
        inputs: the inputs of the trace that are parameters of the plan, with their paths.
        others: the inputs that are buffers of the module, or parameters that the policy ignores, with their paths.
        trained: paths of the parameters that get a gradient from autodiff.
        synced: whether gradients are reduced; if not, they are deferred.
        lifted: the timeline before the first pass; None before the schedule is made.
    """

    plan: Plan
    inputs: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    synced: bool = True
    lifted: Timeline | None = field(default=None, repr=False)

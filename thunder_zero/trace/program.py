"""What Thunder's compilation of one kind of input found out, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thunder_zero.plan import Plan


@dataclass(frozen=True)
class Program:
    """What was found out while one kind of input was compiled.

    Attributes:
        plan: what each parameter is, with what the schedule keeps.
        inputs: inputs of the trace that are parameters, with their paths.
        ignored: inputs of the trace that are parameters which the policy ignores.
        trained: paths of the parameters to which autodiff gives a gradient.
        synced: gradients are reduced; otherwise that is deferred.
    """

    plan: Plan
    inputs: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    synced: bool = True

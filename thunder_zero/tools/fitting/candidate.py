"""Evaluates a policy on a lifted timeline: each unit's bytes alive, bytes sent and recomputed work."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.plan.amounts import itemsize
from thunder_zero.plan.params import ROOT, Plan
from thunder_zero.plan.policy import Policy, is_count
from thunder_zero.schedule.lifetimes import alive_bytes, lifetimes
from thunder_zero.schedule.ops import Compute, Gather, Launch
from thunder_zero.schedule.passes import PASSES, apply_passes
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.units import backward_ends


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of work, in bytes on the wire, for :func:`thunder_zero.tools.fit`.

    Attributes:
        flops_per_byte: FLOPs of recomputed work that cost as much as one byte. The default of 1,000 is about the ratio
            of FLOP/s to B/s, both for an H100 with NVLink and for a CPU on 1 Gbit/s.
        launch_bytes: price of a launch, in addition to its bytes. The default of 128 KiB is about a millisecond at
            1 Gbit/s.

    Raises:
        ValueError: ``flops_per_byte`` is not a number above 0, or ``launch_bytes`` is below 0.
    """

    flops_per_byte: float = 1000.0
    launch_bytes: int = 128 << 10

    def __post_init__(self) -> None:
        flops = self.flops_per_byte
        if not isinstance(flops, int | float) or isinstance(flops, bool) or not flops > 0:
            raise ValueError(f"flops_per_byte is {flops!r}; give a number above 0, such as 1000.0")
        if not is_count(self.launch_bytes):
            raise ValueError(f"launch_bytes is {self.launch_bytes!r}; give a number of bytes, 0 or more")


USUAL_PRICES = Prices()


@dataclass(frozen=True)
class Candidate:
    """A policy to apply to a timeline without passes, and the prices of work."""

    lifted: Timeline
    policy: Policy
    prices: Prices = USUAL_PRICES

    @cached_property
    def timeline(self) -> Timeline:
        """The scheduled timeline."""
        return apply_passes(replace(self.lifted, plan=under(self.lifted.plan, self.policy)), PASSES)

    @cached_property
    def alive(self) -> tuple[int, ...]:
        """The bytes alive at each operation."""
        return alive_bytes(self.timeline)

    @cached_property
    def peak(self) -> int:
        """The most bytes alive."""
        return max(self.alive)

    @cached_property
    def sent(self) -> int:
        """The bytes that the rank sends."""
        return sum(self.timeline.traffic(op).sent for op in self.timeline.ops)

    @cached_property
    def flops(self) -> float:
        """The FLOPs of recomputed work."""
        return sum(self._recomputed_flops)

    @cached_property
    def cost(self) -> float:
        """The cost of gathers, reductions and recomputed work, in bytes on the wire."""
        return sum(self._costs)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units with gradients, in the order of forward, without the root."""
        return tuple(reversed(self._ends))

    @cached_property
    def kept(self) -> frozenset[str]:
        """The units, without the root, that stay gathered from forward to backward.

        ``Policy.keep_unsharded`` names units. With ``reshard_after_forward=None`` the schedule adds further units.
        """
        plan = self.timeline.plan
        return frozenset(plan.by_name[path].unit for path in plan.kept_unsharded) - {ROOT}

    @cached_property
    def _ends(self) -> dict[str, int]:
        return backward_ends(self.timeline)

    @cached_property
    def segments(self) -> dict[str, range]:
        """A mapping from units to their positions in backward. The root has the positions after the last unit."""
        begin = self.timeline.backward_start
        segments: dict[str, range] = {}
        for unit, end in self._ends.items():
            segments[unit] = range(begin, end + 1)
            begin = end + 1
        return segments | {ROOT: range(begin, len(self.timeline.ops))}

    @cached_property
    def left(self) -> dict[str, int]:
        """A mapping from each unit to the bytes that forward leaves for the unit's backward."""
        unit_at = {position: unit for unit, positions in self.segments.items() for position in positions}
        counts: Counter[str] = Counter()
        for memory, life in lifetimes(self.timeline).items():
            if life.start < self.timeline.backward_start < life.stop:
                counts[unit_at[life[-1]]] += self.timeline.nbytes(memory)
        return {unit: counts[unit] for unit in self.units}

    def costs_of(self, unit: str) -> float:
        """Return the cost of a unit's backward: reductions, recomputed work and gathers."""
        ops = self.timeline.ops
        other_costs = (self._costs[index] for index in self.segments[unit] if not isinstance(ops[index], Gather))
        return sum(other_costs) + self._gathers[unit]

    @cached_property
    def _gathers(self) -> defaultdict[str, float]:
        """The costs of gathers for backward, keyed by unit. A gather may start in another unit's backward."""
        costs: defaultdict[str, float] = defaultdict(float)
        for op, cost in zip(self.timeline.ops, self._costs, strict=True):
            if isinstance(op, Gather) and op.backward:
                costs[self.timeline.params_of(op)[0].unit] += cost
        return costs

    @cached_property
    def _costs(self) -> tuple[float, ...]:
        return tuple(
            self.timeline.traffic(op).sent
            + self.prices.launch_bytes * isinstance(op, Launch)
            + flops / self.prices.flops_per_byte
            for op, flops in zip(self.timeline.ops, self._recomputed_flops, strict=True)
        )

    @cached_property
    def _recomputed_flops(self) -> tuple[int, ...]:
        timeline = self.timeline
        return tuple(
            flops_to_repeat(op, timeline) if isinstance(op, Compute) and timeline.recomputes(op) else 0
            for op in timeline.ops
        )


def under(plan: Plan, policy: Policy) -> Plan:
    """Return the plan under a policy that differs only in choices for units and in numbers of bytes."""
    kept = {param.path for param in plan.params if param.unit in policy.keep_unsharded}
    return replace(plan.keeping(kept), policy=policy)


def flops_to_repeat(op: Compute, timeline: Timeline) -> int:
    """Return the FLOPs to repeat an operation. If it has no FLOPs, return the number of written elements."""
    return op.flops or max((_numel(name, timeline) for name in op.writes), default=0)


def _numel(name: str, timeline: Timeline) -> int:
    value = timeline.values.get(name)
    return value.nbytes // itemsize(value.dtype) if value else 0

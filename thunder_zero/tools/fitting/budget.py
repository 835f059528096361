"""Chooses what each unit keeps for backward, so that a step fits into memory at the least cost.

What each choice for a unit leaves, needs and costs is read off schedules where all units choose alike. When backward
comes to a unit, all earlier ones still hold what they left for backward. So the choices of units a, b, c, in the order
of forward, fit if::

    a.peak                       <= budget
    a.left + b.peak              <= budget
    a.left + b.left + c.peak     <= budget

Visits the units in this order with the partial choices that no other beats: less left for less cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.plan.params import ROOT
from thunder_zero.tools.fitting.candidate import Candidate

MOST_PARTIAL = 20_000  # choices that are pursued; beyond it bytes are rounded up, to a thousandth of the budget


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What may be done with one unit.

    Attributes:
        left: bytes that it holds from its forward to its backward.
        peak: the most bytes alive in its backward, without those that earlier units have left.
        cost: of doing so, in any unit.
    """

    left: int
    peak: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Partial:
    left: int
    cost: float
    chosen: tuple[int, ...]


def cheapest(units: Sequence[Sequence[UnitCost]], budget: int) -> tuple[int, ...] | None:
    """The number of the choice of each unit, in the order of forward, that fit and cost least; None if none fit."""
    partial = [_Partial(0, 0.0, ())]
    for choices in units:
        longer = [
            _Partial(one.left + choice.left, one.cost + choice.cost, (*one.chosen, number))
            for one in partial
            for number, choice in enumerate(choices)
            if one.left + choice.peak <= budget
        ]
        partial = _unbeaten(longer, 1)
        if len(partial) > MOST_PARTIAL:
            partial = _unbeaten(partial, max(budget // 1000, 1))
    return min(partial, key=lambda one: one.cost).chosen if partial else None


def _unbeaten(partial: list[_Partial], grain: int) -> list[_Partial]:
    """Those that leave less, rounded up to ``grain`` bytes, or cost less than all others."""
    found: list[_Partial] = []
    least = float("inf")
    rounded = (_Partial(-(-one.left // grain) * grain, one.cost, one.chosen) for one in partial)
    for one in sorted(rounded, key=lambda one: (one.left, one.cost)):
        if one.cost < least:
            found.append(one)
            least = one.cost
    return found


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """What may be done with one unit: it stays gathered for backward (``Policy.keep_unsharded``); backward recomputes
    it whole (``Policy.recompute_units``)."""

    kept: bool = False
    recomputed: bool = False


PLAIN, RECOMPUTED = UnitChoice(), UnitChoice(recomputed=True)
KEPT, KEPT_AND_RECOMPUTED = UnitChoice(kept=True), UnitChoice(kept=True, recomputed=True)


@dataclass(frozen=True)
class Parts:
    """The parts of a step.

    Attributes:
        units: in the order of forward.
        options: the choices for each.
        choices: for the end of backward, for each unit, and for forward: what each option leaves, needs and costs. The
            beginning of backward is the last unit's. The end of backward and forward have one option.
        most_too_high: bytes by which the parts of a candidate add up to more than it needs, at most.
    """

    units: tuple[str, ...]
    options: tuple[UnitChoice, ...]
    choices: tuple[tuple[UnitCost, ...], ...]
    most_too_high: int = 0

    @classmethod
    def read_off(cls, units: tuple[str, ...], options: tuple[UnitChoice, ...], alike: Sequence[Candidate]) -> Parts:
        """The parts, from a candidate for each option, all of whose units choose it."""
        end = max(_peak(one, one.segments[ROOT]) for one in alike)
        forward = max(_peak(one, range(one.timeline.backward_start)) - sum(one.left.values()) for one in alike)
        of_units: list[tuple[UnitCost, ...]] = []
        earlier = [0] * len(alike)  # what the units before have left
        for unit in units:
            needs = [_peak(one, one.segments[unit]) - left for one, left in zip(alike, earlier, strict=True)]
            of_units.append(
                tuple(
                    UnitCost(one.left[unit], need, one.costs_of(unit)) for one, need in zip(alike, needs, strict=True)
                )
            )
            earlier = [left + one.left[unit] for one, left in zip(alike, earlier, strict=True)]
        parts = cls(units, options, ((UnitCost(0, end, 0.0),), *of_units, (UnitCost(0, forward, 0.0),)))
        sums = (parts.sums((0, *[number] * len(units), 0))[0] for number in range(len(options)))
        too_high = max(peak - one.peak for peak, one in zip(sums, alike, strict=True))
        return replace(parts, most_too_high=max(too_high, 0))

    @cached_property
    def _number(self) -> dict[UnitChoice, int]:
        return {choice: number for number, choice in enumerate(self.options)}

    def by_unit(self, numbers: Sequence[int]) -> dict[str, UnitChoice]:
        """The choice of each unit, from the numbers of the options of all parts."""
        return {unit: self.options[number] for unit, number in zip(self.units, numbers[1:-1], strict=True)}

    def numbers(self, keep_unsharded: Sequence[str], recompute_units: Sequence[str]) -> tuple[int, ...]:
        """The number of the option of each part."""
        of_units = (self._number[UnitChoice(unit in keep_unsharded, unit in recompute_units)] for unit in self.units)
        return (0, *of_units, 0)

    def sums(self, numbers: Sequence[int]) -> tuple[int, float]:
        """The most bytes alive, and the cost, of the options of these numbers."""
        left = peak = 0
        cost = 0.0
        for options, number in zip(self.choices, numbers, strict=True):
            peak = max(peak, left + options[number].peak)
            left += options[number].left
            cost += options[number].cost
        return peak, cost


def _peak(candidate: Candidate, positions: range) -> int:
    return max((candidate.alive[at] for at in positions), default=0)

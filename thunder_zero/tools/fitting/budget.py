"""Chooses what each unit keeps for backward, so that a step fits into memory at the least cost.

Schedules in which all units choose alike tell what each choice for a unit leaves, needs and costs. When backward comes
to a unit, all earlier units still hold what they left for backward. So the choices of units a, b, c, in the order of
forward, fit if::

    a.peak                       <= budget
    a.left + b.peak              <= budget
    a.left + b.left + c.peak     <= budget

The units are visited in this order. Of the choices so far, only those are kept that no other beats in both bytes left
and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.plan.params import ROOT
from thunder_zero.tools.fitting.candidate import Candidate

MOST_PARTIAL = 20_000  # partial choices; if there are more, bytes are rounded up to a thousandth of the budget


@dataclass(frozen=True, slots=True)
class UnitCost:
    """What one choice for a unit costs.

    Attributes:
        left: bytes that the unit holds from its forward to its backward.
        peak: the most bytes alive in its backward, without those that earlier units have left.
        cost: cost of the work, in bytes on the wire.
    """

    left: int
    peak: int
    cost: float


@dataclass(frozen=True, slots=True)
class _Partial:
    """Choices for the first units: their numbers, the bytes that they leave, and their cost."""

    left: int
    cost: float
    chosen: tuple[int, ...]


def cheapest(units: Sequence[Sequence[UnitCost]], budget: int) -> tuple[int, ...] | None:
    """Return the number of a choice for each unit that together fit and cost least; None if no choices fit."""
    partial = [_Partial(0, 0.0, ())]
    for choices in units:
        longer = [
            _Partial(start.left + choice.left, start.cost + choice.cost, (*start.chosen, number))
            for start in partial
            for number, choice in enumerate(choices)
            if start.left + choice.peak <= budget
        ]
        partial = _unbeaten(longer, 1)
        if len(partial) > MOST_PARTIAL:
            partial = _unbeaten(partial, max(budget // 1000, 1))
    return min(partial, key=lambda choices: choices.cost).chosen if partial else None


def _unbeaten(partial: list[_Partial], grain: int) -> list[_Partial]:
    """Return the choices that no other beats in both bytes left, rounded up to ``grain``, and cost."""
    unbeaten: list[_Partial] = []
    least = float("inf")
    rounded = (replace(choices, left=-(-choices.left // grain) * grain) for choices in partial)
    for choices in sorted(rounded, key=lambda choices: (choices.left, choices.cost)):
        if choices.cost < least:
            unbeaten.append(choices)
            least = choices.cost
    return unbeaten


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """A choice for one unit: ``kept`` gathered for backward (``Policy.keep_unsharded``), or ``recomputed`` there as a
    whole (``Policy.recompute_units``)."""

    kept: bool = False
    recomputed: bool = False


PLAIN, RECOMPUTED = UnitChoice(), UnitChoice(recomputed=True)
KEPT, KEPT_AND_RECOMPUTED = UnitChoice(kept=True), UnitChoice(kept=True, recomputed=True)


@dataclass(frozen=True)
class Parts:
    """The parts of a step: the end of backward, each unit's part of backward, and forward.

    Attributes:
        units: the units, in the order of forward.
        options: the choices for each unit.
        choices: for each part, what each option leaves, needs and costs. The beginning of backward belongs to the last
            unit. The end of backward, and forward, have one option.
        most_too_high: the most bytes by which the sum of a candidate's parts exceeds its peak.
    """

    units: tuple[str, ...]
    options: tuple[UnitChoice, ...]
    choices: tuple[tuple[UnitCost, ...], ...]
    most_too_high: int = 0

    @classmethod
    def read_off(cls, units: tuple[str, ...], options: tuple[UnitChoice, ...], alike: Sequence[Candidate]) -> Parts:
        """Return the parts, read off a candidate for each option in which all units choose that option."""
        end = max(_peak(candidate, candidate.segments[ROOT]) for candidate in alike)
        forward = max(
            _peak(candidate, range(candidate.timeline.backward_start)) - sum(candidate.left.values())
            for candidate in alike
        )
        choices: list[tuple[UnitCost, ...]] = []
        earlier = [0] * len(alike)  # bytes that the units before have left
        for unit in units:
            choices.append(
                tuple(
                    UnitCost(
                        candidate.left[unit],
                        _peak(candidate, candidate.segments[unit]) - left,
                        candidate.costs_of(unit),
                    )
                    for candidate, left in zip(alike, earlier, strict=True)
                )
            )
            earlier = [left + candidate.left[unit] for candidate, left in zip(alike, earlier, strict=True)]
        parts = cls(units, options, ((UnitCost(0, end, 0.0),), *choices, (UnitCost(0, forward, 0.0),)))
        sums = (parts.sums((0, *[number] * len(units), 0))[0] for number in range(len(options)))
        too_high = max(peak - candidate.peak for peak, candidate in zip(sums, alike, strict=True))
        return replace(parts, most_too_high=max(too_high, 0))

    @cached_property
    def _number(self) -> dict[UnitChoice, int]:
        return {choice: number for number, choice in enumerate(self.options)}

    def by_unit(self, numbers: Sequence[int]) -> dict[str, UnitChoice]:
        """Return the choice of each unit, from the numbers of the options of all parts."""
        return {unit: self.options[number] for unit, number in zip(self.units, numbers[1:-1], strict=True)}

    def numbers(self, keep_unsharded: Sequence[str], recompute_units: Sequence[str]) -> tuple[int, ...]:
        """Return the number of the option of each part, from the fields of a policy."""
        choices = (UnitChoice(unit in keep_unsharded, unit in recompute_units) for unit in self.units)
        return (0, *(self._number[choice] for choice in choices), 0)

    def sums(self, numbers: Sequence[int]) -> tuple[int, float]:
        """Return the most bytes alive, and the cost, of a step with the options of these numbers."""
        left = peak = 0
        cost = 0.0
        for options, number in zip(self.choices, numbers, strict=True):
            peak = max(peak, left + options[number].peak)
            left += options[number].left
            cost += options[number].cost
        return peak, cost


def _peak(candidate: Candidate, positions: range) -> int:
    return max((candidate.alive[position] for position in positions), default=0)

"""Reads off what each choice for a unit leaves, needs and costs, where all units choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.plan import ROOT
from thunder_zero.tools.fitting.budget import Choice
from thunder_zero.tools.fitting.candidate import Candidate


@dataclass(frozen=True, slots=True)
class UnitChoice:
    """What may be done with one unit.

    Attributes:
        kept: it stays gathered for backward (``Policy.keep_units``).
        again: backward computes it again whole (``Policy.recompute_units``).
    """

    kept: bool = False
    again: bool = False


PLAIN, AGAIN = UnitChoice(), UnitChoice(again=True)
KEPT, KEPT_AND_AGAIN = UnitChoice(kept=True), UnitChoice(kept=True, again=True)


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
    choices: tuple[tuple[Choice, ...], ...]
    most_too_high: int = 0

    @classmethod
    def read_off(cls, units: tuple[str, ...], options: tuple[UnitChoice, ...], alike: Sequence[Candidate]) -> Parts:
        """The parts, from a candidate for each option, all of whose units choose it."""
        end = max(_peak(one, one.segments[ROOT]) for one in alike)
        forward = max(_peak(one, range(one.timeline.border)) - sum(one.left.values()) for one in alike)
        of_units: list[tuple[Choice, ...]] = []
        earlier = [0] * len(alike)  # what the units before have left
        for unit in units:
            needs = [_peak(one, one.segments[unit]) - left for one, left in zip(alike, earlier, strict=True)]
            of_units.append(
                tuple(Choice(one.left[unit], need, one.costs_of(unit)) for one, need in zip(alike, needs, strict=True))
            )
            earlier = [left + one.left[unit] for one, left in zip(alike, earlier, strict=True)]
        parts = cls(units, options, ((Choice(0, end, 0.0),), *of_units, (Choice(0, forward, 0.0),)))
        sums = (parts.sums((0, *[number] * len(units), 0))[0] for number in range(len(options)))
        too_high = max(peak - one.peak for peak, one in zip(sums, alike, strict=True))
        return replace(parts, most_too_high=max(too_high, 0))

    @cached_property
    def _number(self) -> dict[UnitChoice, int]:
        return {choice: number for number, choice in enumerate(self.options)}

    def by_unit(self, numbers: Sequence[int]) -> dict[str, UnitChoice]:
        """The choice of each unit, from the numbers of the options of all parts."""
        return {unit: self.options[number] for unit, number in zip(self.units, numbers[1:-1], strict=True)}

    def numbers(self, keep_units: Sequence[str], recompute_units: Sequence[str]) -> tuple[int, ...]:
        """The number of the option of each part."""
        of_units = (self._number[UnitChoice(unit in keep_units, unit in recompute_units)] for unit in self.units)
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

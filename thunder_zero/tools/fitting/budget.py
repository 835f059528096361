"""Chooses tensors to keep for backward, so that a step fits into memory at the least cost.

Each choice is measured on a schedule that applies this choice to all units. This gives bytes and a cost for each unit.
In a unit's backward, all earlier units still hold their bytes for backward. So choices for the units a, b, c, in the
order of forward, fit if::

    a.peak                       <= budget
    a.left + b.peak              <= budget
    a.left + b.left + c.peak     <= budget

The search visits units in this order, and drops a partial choice if another is better in bytes and cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from thunder_zero.plan.params import ROOT
from thunder_zero.tools.fitting.candidate import Candidate

MOST_PARTIAL = 20_000  # with more partial choices, bytes are rounded up to a thousandth of the budget


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The bytes and the cost of one choice for a unit."""

    left: int  # bytes that the unit holds from its forward to its backward
    peak: int  # the most bytes alive in the unit's backward, without bytes that earlier units left
    cost: float  # the cost of the unit's work, in bytes on the wire


@dataclass(frozen=True, slots=True)
class _Partial:
    """Choices for the first units: option indices, the bytes left by these units, and the cost."""

    left: int
    cost: float
    chosen: tuple[int, ...]


def cheapest(units: Sequence[Sequence[UnitCost]], budget: int) -> tuple[int, ...] | None:
    """Return the cheapest choices that fit the budget, as an index for each unit; None if no choices fit."""
    partial = [_Partial(0, 0.0, ())]
    for choices in units:
        longer = [
            _Partial(start.left + choice.left, start.cost + choice.cost, (*start.chosen, index))
            for start in partial
            for index, choice in enumerate(choices)
            if start.left + choice.peak <= budget
        ]
        partial = _unbeaten(longer, 1)
        if len(partial) > MOST_PARTIAL:
            partial = _unbeaten(partial, max(budget // 1000, 1))
    return min(partial, key=lambda choices: choices.cost).chosen if partial else None


def _unbeaten(partial: list[_Partial], grain: int) -> list[_Partial]:
    """Drop each partial choice if another has no higher cost and no more bytes (rounded up to ``grain``)."""
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
    """A choice for one unit. A ``kept`` unit stays gathered for backward (``Policy.keep_unsharded``). Backward
    recomputes a ``recomputed`` unit as a whole (``Policy.recompute_units``)."""

    kept: bool = False
    recomputed: bool = False


PLAIN, RECOMPUTED = UnitChoice(), UnitChoice(recomputed=True)
KEPT, KEPT_AND_RECOMPUTED = UnitChoice(kept=True), UnitChoice(kept=True, recomputed=True)


@dataclass(frozen=True)
class Parts:
    """The parts of a step: the end of backward, each unit's backward, and forward."""

    units: tuple[str, ...]  # the units, in the order of forward
    options: tuple[UnitChoice, ...]  # the choices for each unit
    # for each part, the bytes and the cost of each option. The beginning of backward belongs to the last unit. Forward
    # and the end of backward have a single option.
    choices: tuple[tuple[UnitCost, ...], ...]
    most_too_high: int = 0  # the most bytes by which the parts of a candidate add up to more than its peak

    @classmethod
    def read_off(cls, units: tuple[str, ...], options: tuple[UnitChoice, ...], alike: Sequence[Candidate]) -> Parts:
        """Return the parts. Each option is measured on a candidate that applies this option to all units."""
        end = max(_peak(candidate, candidate.segments[ROOT]) for candidate in alike)
        forward = max(
            _peak(candidate, range(candidate.timeline.backward_start)) - sum(candidate.left.values())
            for candidate in alike
        )
        choices: list[tuple[UnitCost, ...]] = []
        earlier = [0] * len(alike)  # bytes that earlier units left, by candidate
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
        """Return a mapping from units to choices. ``numbers`` are the option indices of all parts."""
        return {unit: self.options[number] for unit, number in zip(self.units, numbers[1:-1], strict=True)}

    def numbers(self, keep_unsharded: Sequence[str], recompute_units: Sequence[str]) -> tuple[int, ...]:
        """Return each part's option index under a policy with these fields."""
        choices = (UnitChoice(unit in keep_unsharded, unit in recompute_units) for unit in self.units)
        return (0, *(self._number[choice] for choice in choices), 0)

    def sums(self, numbers: Sequence[int]) -> tuple[int, float]:
        """Return the most bytes alive in a step, and the step's cost, for these option indices."""
        left = peak = 0
        cost = 0.0
        for options, number in zip(self.choices, numbers, strict=True):
            peak = max(peak, left + options[number].peak)
            left += options[number].left
            cost += options[number].cost
        return peak, cost


def _peak(candidate: Candidate, positions: range) -> int:
    return max((candidate.alive[position] for position in positions), default=0)

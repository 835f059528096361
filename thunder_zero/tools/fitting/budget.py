"""Chooses what each unit keeps for backward, so that a step fits into memory at the least cost.

When backward comes to a unit, all earlier ones still hold what they left for backward. So the choices of units a, b, c,
in the order of forward, fit if::

    a.peak                       <= budget
    a.left + b.peak              <= budget
    a.left + b.left + c.peak     <= budget

Visits the units in this order with the partial choices that no other beats: less left for less cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_PARTIAL = 20_000  # choices that are pursued; beyond it bytes are rounded up, to a thousandth of the budget


@dataclass(frozen=True, slots=True)
class Choice:
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


def cheapest(units: Sequence[Sequence[Choice]], budget: int) -> tuple[int, ...] | None:
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

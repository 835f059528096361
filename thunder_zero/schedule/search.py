"""Searches the choices of units that fit into a number of bytes, on one lifted timeline.

Each choice is evaluated for all units alike; what a unit leaves and needs is read off there, ``budget.py`` chooses, and
the schedule of what it chose is evaluated as it is. Where that needs more bytes than its parts say, it chooses again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from thunder_zero.plan import ROOT
from thunder_zero.policy import STAGES, Policy
from thunder_zero.schedule.budget import Choice, cheapest
from thunder_zero.schedule.candidate import Candidate
from thunder_zero.schedule.timeline import Timeline

Beside = Callable[[tuple[int, int]], int]  # from bytes of a bucket and in flight

CORRECTIONS = 8  # of a choice whose parts add up to more than it was chosen for
TRIES = 24  # of cheaper choices for single units


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen, as paths of units and bytes."""

    keep_units: tuple[str, ...]
    recompute_units: tuple[str, ...]
    bucket_bytes: int
    in_flight_bytes: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket and in flight."""
        return self.bucket_bytes, self.in_flight_bytes

    def name_of(self, unit: str) -> str:
        """The name of the choice of a unit."""
        parts = ("keep" * (unit in self.keep_units), "again" * (unit in self.recompute_units))
        return " ".join(filter(None, parts))

    def policy(self, asked: Policy) -> Policy:
        """The policy that was asked for, with these choices."""
        return replace(
            asked,
            keep_units=self.keep_units,
            recompute_units=self.recompute_units,
            bucket_bytes=self.bucket_bytes,
            in_flight_bytes=self.in_flight_bytes,
        )


@dataclass(frozen=True)
class Search:
    """The candidates for one program.

    Attributes:
        lifted: its timeline before any pass.
        asked: the policy that was asked for.
        evaluated: candidates by their choices.
    """

    lifted: Timeline
    asked: Policy
    evaluated: dict[Choices, Candidate] = field(default_factory=dict)

    def candidate(self, choices: Choices) -> Candidate:
        """The timeline with these choices."""
        if choices not in self.evaluated:
            self.evaluated[choices] = Candidate(self.lifted, choices.policy(self.asked))
        return self.evaluated[choices]

    def best(self, memory_bytes: int, beside: Beside) -> Choices | None:
        """The cheapest choices that take at most ``memory_bytes``, and among equals those with the largest buckets.

        Args:
            memory_bytes: that a step may take.
            beside: what it takes besides the bytes that the estimate counts.
        """
        found = [
            choices
            for sizes in self.sizes
            if (choices := self._best_of(sizes, memory_bytes - beside(sizes))) is not None
        ]
        return min(found, key=lambda choices: self.candidate(choices).cost, default=None)

    def least(self, beside: Beside) -> Choices:
        """Of the choices that are alike for all units, and not kept, the one that takes the fewest bytes."""
        units = self.candidate(_choices({}, self.sizes[0])).units
        tried = [_choices(dict.fromkeys(units, name), sizes) for name in ("", "again") for sizes in self.sizes]
        return min(tried, key=lambda choices: self.candidate(choices).peak + beside(choices.sizes))

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a bucket and in flight: those that were asked for, and smaller ones: two units, one, nothing."""
        most = self.asked.bucket_bytes, self.lifted.plan.in_flight_bytes
        counts: Counter[str] = Counter()
        for param in self.lifted.plan.params:
            counts[param.unit] += max(param.full_bytes, param.grad_bytes)
        largest = max(counts.values())
        smaller = ((min(most[0], in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0))
        return (most, *(sizes for sizes in smaller if sizes[1] < most[1]))

    def _best_of(self, sizes: tuple[int, int], target: int) -> Choices | None:
        units = self._units(sizes)
        aim = target
        for _ in range(CORRECTIONS):
            chosen = cheapest([choices for _, choices in units], aim)
            if chosen is None:
                return None
            names = {unit: choices[number].name for (unit, choices), number in zip(units, chosen, strict=True)}
            choices = _choices(names, sizes)
            excess = self.candidate(choices).peak - target
            if excess <= 0:
                return self._improved(choices, units, target)
            aim -= excess
        return None

    def _improved(self, choices: Choices, units: list[tuple[str, list[Choice]]], target: int) -> Choices:
        """The choices, with cheaper ones for single units that still fit: parts may say more than the whole needs."""
        names = {unit: choices.name_of(unit) for unit, _ in units if unit != ROOT}
        tries = TRIES
        for unit, possible in units:
            for choice in sorted(possible, key=lambda one: one.cost):
                if unit == ROOT or choice.name == names[unit] or not tries:
                    break
                tries -= 1
                other = _choices(names | {unit: choice.name}, choices.sizes)
                is_cheaper = self.candidate(other).cost < self.candidate(choices).cost
                if is_cheaper and self.candidate(other).peak <= target:
                    choices, names = other, names | {unit: choice.name}
        return choices

    def _units(self, sizes: tuple[int, int]) -> list[tuple[str, list[Choice]]]:
        """For each unit, in the order of forward, what each choice leaves, needs and costs, if all units choose alike;
        before them the end of backward, after them forward. The beginning of backward is the last unit's."""
        options = ("", "again", *(("keep", "keep again") if not STAGES[self.asked.stage].gathered_once else ()))
        plain = self.candidate(_choices({}, sizes))
        alike = {name: self.candidate(_choices(dict.fromkeys(plain.units, name), sizes)) for name in options}
        end = [Choice(0, max(_peak(one, one.segments[ROOT]) for one in alike.values()), 0.0)]
        units: list[tuple[str, list[Choice]]] = [(ROOT, end)]
        for number, unit in enumerate(plain.units):
            choices = []
            for name, one in alike.items():
                earlier = sum(one.left[other] for other in plain.units[:number])
                own = _peak(one, one.segments[unit]) - earlier
                choices.append(Choice(one.left[unit], own, one.costs_of(unit), name))
            units.append((unit, choices))
        forward = max(max(one.alive[: one.forward]) - sum(one.left.values()) for one in alike.values())
        return [*units, (ROOT, [Choice(0, forward, 0.0)])]


def _peak(candidate: Candidate, positions: range) -> int:
    return max((candidate.alive[at] for at in positions), default=0)


def _choices(names: Mapping[str, str], sizes: tuple[int, int]) -> Choices:
    keep = tuple(unit for unit, name in names.items() if "keep" in name)
    again = tuple(unit for unit, name in names.items() if "again" in name)
    return Choices(keep, again, *sizes)

"""Searches the choices of units that fit into a number of bytes, on one lifted timeline.

Each choice is evaluated for all units alike; what a unit leaves and needs is read off there, ``budget.py`` chooses, and
the schedule of what it chose is evaluated as it is. Where that needs more bytes than its parts say, or fewer, it
chooses again, and then tries cheaper choices for single units and for pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product

from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.tools.fitting.budget import KEPT, KEPT_AND_RECOMPUTED, PLAIN, RECOMPUTED, Parts, UnitChoice, cheapest
from thunder_zero.tools.fitting.candidate import USUAL_PRICES, Candidate, Prices

Overhead = Callable[[tuple[int, int]], int]  # from bytes of a bucket and in flight

CORRECTIONS = 8  # of the bytes that the parts are chosen for
TRIES = 24  # of cheaper choices for one unit or two
FINEST = 500  # part of the bytes below which the search for the least stops


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen, as paths of units and bytes."""

    keep_unsharded: tuple[str, ...]
    recompute_units: tuple[str, ...]
    bucket_bytes: int
    in_flight_bytes: int

    @classmethod
    def of(cls, chosen: Mapping[str, UnitChoice], sizes: tuple[int, int]) -> Choices:
        """The choices of these units, with bytes of a bucket and in flight."""
        kept = tuple(unit for unit, choice in chosen.items() if choice.kept)
        return cls(kept, tuple(unit for unit, choice in chosen.items() if choice.recomputed), *sizes)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a bucket and in flight."""
        return self.bucket_bytes, self.in_flight_bytes

    def policy(self, asked: Policy) -> Policy:
        """The policy that was asked for, with these choices."""
        return replace(
            asked,
            keep_unsharded=self.keep_unsharded,
            recompute_units=self.recompute_units,
            bucket_bytes=self.bucket_bytes,
            in_flight_bytes=self.in_flight_bytes,
        )


@dataclass(frozen=True)
class Search:
    """The candidates for one program, from its timeline before any pass and the policy as asked for. ``tell`` is called
    with their number so far, before each is evaluated."""

    lifted: Timeline
    asked: Policy
    prices: Prices = USUAL_PRICES
    tell: Callable[[int], None] = lambda count: None
    evaluated: dict[Choices, Candidate] = field(default_factory=dict)

    def candidate(self, choices: Choices) -> Candidate:
        """The timeline with these choices."""
        if choices not in self.evaluated:
            self.tell(len(self.evaluated))
            self.evaluated[choices] = Candidate(self.lifted, choices.policy(self.asked), self.prices)
        return self.evaluated[choices]

    def best(self, memory_bytes: int, overhead: Overhead) -> Choices | None:
        """The cheapest choices that take at most ``memory_bytes``, and among equals those with the largest buckets;
        ``overhead`` is what a step takes in addition to the bytes that the estimate counts."""
        best, tries = None, TRIES
        for choices in sorted(self._fitting(memory_bytes, overhead), key=self._cost):
            target = memory_bytes - overhead(choices.sizes)
            best, tries = self._improved(choices, best or choices, target, tries)
        return best

    def about(self, memory_bytes: int, overhead: Overhead) -> Choices | None:
        """Almost the same with fewer candidates: without cheaper choices for single units."""
        return min(self._fitting(memory_bytes, overhead), key=self._cost, default=None)

    def least(self, overhead: Overhead) -> Choices:
        """The choices that take the fewest bytes, as far as the search finds them: units may differ. The sizes of
        buckets are those that are best for units that do not."""
        best = self.least_alike(overhead, (PLAIN, RECOMPUTED, *self._options))
        nbytes = self._total(best, overhead)
        step = nbytes // 8
        while step > nbytes // FINEST:
            lower = self._fitting_of(best.sizes, nbytes - step - overhead(best.sizes))
            if lower is None:
                step //= 4
            else:
                best, nbytes = lower, self._total(lower, overhead)
        return best

    def least_alike(self, overhead: Overhead, options: Sequence[UnitChoice] = (PLAIN, RECOMPUTED)) -> Choices:
        """Of these choices for all units alike, the one that takes the fewest bytes."""
        tried = [self.alike(choice, sizes) for choice in options for sizes in self.sizes]
        return min(tried, key=lambda choices: self._total(choices, overhead))

    def _total(self, choices: Choices, overhead: Overhead) -> int:
        """The bytes that a step takes."""
        return self.candidate(choices).peak + overhead(choices.sizes)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units to choose for, in the order of forward."""
        return self.candidate(Choices.of({}, self.sizes[0])).units

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a bucket and in flight: those that were asked for, and smaller ones: two units, one, nothing."""
        plan = self.lifted.plan.sizes
        most = plan.bucket_bytes, plan.in_flight_bytes
        largest = self.lifted.plan.largest_unit_bytes
        smaller = ((min(most[0], in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0))
        return (most, *(sizes for sizes in smaller if sizes[1] < most[1]))

    def parts(self, sizes: tuple[int, int]) -> Parts:
        """What each choice for each unit leaves, needs and costs."""
        return Parts.read_off(self.units, self._options, [self.candidate(choices) for choices in self._alike(sizes)])

    @property
    def _options(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit; among equals the first ones are taken. What is kept unsharded anyway is not kept."""
        return (*(() if STAGES[self.asked.stage].kept_unsharded else (KEPT, KEPT_AND_RECOMPUTED)), PLAIN, RECOMPUTED)

    def alike(self, choice: UnitChoice, sizes: tuple[int, int]) -> Choices:
        """The same choice for all units."""
        return Choices.of(dict.fromkeys(self.units, choice), sizes)

    def _alike(self, sizes: tuple[int, int]) -> list[Choices]:
        """For each option, the choices of all units alike."""
        return [self.alike(choice, sizes) for choice in self._options]

    def _cost(self, choices: Choices) -> float:
        return self.candidate(choices).cost

    def _fitting(self, memory_bytes: int, overhead: Overhead) -> list[Choices]:
        """For each size of buckets, choices that fit."""
        found = (self._fitting_of(sizes, memory_bytes - overhead(sizes)) for sizes in self.sizes)
        return [choices for choices in found if choices is not None]

    def _fitting_of(self, sizes: tuple[int, int], target: int) -> Choices | None:
        """The cheapest choices that fit, by their parts. These may be chosen for more bytes than there are, if the
        whole then fits, or for fewer: looks for the most bytes."""
        parts = self.parts(sizes)
        found: Choices | None = None
        low: int | None = None  # bytes for which the choices fit, or for which there are none
        high: int | None = None  # bytes for which they do not fit
        aim = target
        for _ in range(CORRECTIONS):
            chosen = cheapest(parts.choices, aim)
            if chosen is None:
                low, following = aim, aim + parts.most_too_high
            else:
                choices = Choices.of(parts.by_unit(chosen), sizes)
                spare = target - self.candidate(choices).peak
                following = aim + spare
                if spare < 0:
                    high = aim
                elif choices == found:
                    break
                else:
                    low, found = aim, choices
            if low is not None and high is not None:
                following = (low + high) // 2
            if following == aim:
                break
            aim = following
        fitting = [choices for choices in self._alike(sizes) if self.candidate(choices).peak <= target]
        return min([found, *fitting] if found else fitting, key=self._cost, default=None)

    def _improved(self, start: Choices, best: Choices, target: int, tries: int) -> tuple[Choices, int]:
        """The best so far, or choices that are cheaper and fit: like the start, but for one unit or two. With the
        number of tries that are left."""
        parts = self.parts(start.sizes)
        moves = self._moves(parts, start, best, target)
        while tries and (move := next(moves, None)) is not None:
            tries -= move not in self.evaluated
            if self._cost(move) < self._cost(best) and self.candidate(move).peak <= target:
                start = best = move
                moves = self._moves(parts, start, best, target)
        return best, tries

    def _moves(self, parts: Parts, start: Choices, best: Choices, target: int) -> Iterator[Choices]:
        """Choices that differ from the start in one unit or two and should be cheaper than the best: first those that
        should fit, by cost, then by the bytes that should be missing."""
        now = parts.numbers(start.keep_unsharded, start.recompute_units)
        peak, cost = parts.sums(now)
        peak, cost = self.candidate(start).peak - peak, self._cost(start) - cost  # what the sums leave out
        found = []
        for numbers in _neighbours(now, len(parts.options)):
            of_parts = parts.sums(numbers)
            excess = of_parts[0] + peak - target
            if of_parts[1] + cost < self._cost(best):
                found.append((max(excess, 0), of_parts[1], numbers))
        for _, _, numbers in sorted(found):
            yield Choices.of(parts.by_unit(numbers), start.sizes)


def _neighbours(numbers: tuple[int, ...], options: int) -> Iterator[tuple[int, ...]]:
    """The numbers with one or two changed. The first and the last are not for units, and stay."""
    inner = range(1, len(numbers) - 1)
    for places in (*((at,) for at in inner), *combinations(inner, 2)):
        for others in product(range(options), repeat=len(places)):
            if all(numbers[at] != other for at, other in zip(places, others, strict=True)):
                changed = dict(zip(places, others, strict=True))
                yield tuple(changed.get(at, number) for at, number in enumerate(numbers))

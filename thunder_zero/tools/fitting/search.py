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

Overhead = Callable[[Policy], int]  # what a step takes besides the bytes that the estimate counts; by sizes of buckets

CORRECTIONS = 8  # of the bytes that the parts are chosen for
TRIES = 24  # of cheaper choices for one unit or two
FINEST = 500  # part of the bytes below which the search for the least stops


@dataclass(frozen=True)
class Search:
    """The candidates for one program, from its timeline before any pass and the policy as asked for. ``tell`` is called
    with their number so far, before each is evaluated."""

    lifted: Timeline
    asked: Policy
    prices: Prices = USUAL_PRICES
    tell: Callable[[int], None] = lambda count: None
    evaluated: dict[Policy, Candidate] = field(default_factory=dict)

    def candidate(self, policy: Policy) -> Candidate:
        """The timeline under a policy."""
        if policy not in self.evaluated:
            self.tell(len(self.evaluated))
            self.evaluated[policy] = Candidate(self.lifted, policy, self.prices)
        return self.evaluated[policy]

    def cost(self, policy: Policy) -> float:
        """Of its work."""
        return self.candidate(policy).cost

    def best(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """The cheapest choices that take at most ``memory_bytes``, and among equals those with the largest buckets."""
        best, tries = None, TRIES
        for policy in sorted(self._fitting(memory_bytes, overhead), key=self.cost):
            target = memory_bytes - overhead(policy)
            best, tries = self._improved(policy, best or policy, target, tries)
        return best

    def about(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """Almost the same with fewer candidates: without cheaper choices for single units."""
        return min(self._fitting(memory_bytes, overhead), key=self.cost, default=None)

    def least(self, overhead: Overhead) -> Policy:
        """The choices that take the fewest bytes, as far as the search finds them: units may differ. The sizes of
        buckets are those that are best for units that do not."""
        best = self.least_alike(overhead, (PLAIN, RECOMPUTED, *self._options))
        nbytes = self._total(best, overhead)
        step = nbytes // 8
        while step > nbytes // FINEST:
            lower = self._fitting_of(best, nbytes - step - overhead(best))
            if lower is None:
                step //= 4
            else:
                best, nbytes = lower, self._total(lower, overhead)
        return best

    def least_alike(self, overhead: Overhead, options: Sequence[UnitChoice] = (PLAIN, RECOMPUTED)) -> Policy:
        """Of these choices for all units alike, the one that takes the fewest bytes."""
        tried = [self.alike(choice, sized) for choice in options for sized in self.sized]
        return min(tried, key=lambda policy: self._total(policy, overhead))

    def _total(self, policy: Policy, overhead: Overhead) -> int:
        """The bytes that a step takes."""
        return self.candidate(policy).peak + overhead(policy)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units to choose for, in the order of forward."""
        return self.candidate(chosen({}, self.sized[0])).units

    @cached_property
    def sized(self) -> tuple[Policy, ...]:
        """What was asked for, with its bytes of a bucket and in flight, and smaller ones: two units, one, nothing."""
        sizes, largest = self.lifted.plan.sizes, self.lifted.plan.largest_unit_bytes
        smaller = [(min(sizes.bucket_bytes, in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0)]
        every = (sizes.bucket_bytes, sizes.in_flight_bytes), *(one for one in smaller if one[1] < sizes.in_flight_bytes)
        return tuple(replace(self.asked, bucket_bytes=one[0], in_flight_bytes=one[1]) for one in every)

    def parts(self, sized: Policy) -> Parts:
        """What each choice for each unit leaves, needs and costs."""
        return Parts.read_off(self.units, self._options, [self.candidate(policy) for policy in self._alike(sized)])

    @property
    def _options(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit; among equals the first ones are taken. What is kept unsharded anyway is not kept."""
        return (*(() if STAGES[self.asked.stage].kept_unsharded else (KEPT, KEPT_AND_RECOMPUTED)), PLAIN, RECOMPUTED)

    def alike(self, choice: UnitChoice, sized: Policy) -> Policy:
        """The same choice for all units."""
        return chosen(dict.fromkeys(self.units, choice), sized)

    def _alike(self, sized: Policy) -> list[Policy]:
        """For each option, the choices of all units alike."""
        return [self.alike(choice, sized) for choice in self._options]

    def _fitting(self, memory_bytes: int, overhead: Overhead) -> list[Policy]:
        """For each size of buckets, choices that fit."""
        found = (self._fitting_of(sized, memory_bytes - overhead(sized)) for sized in self.sized)
        return [policy for policy in found if policy is not None]

    def _fitting_of(self, sized: Policy, target: int) -> Policy | None:
        """The cheapest choices that fit, by their parts. These may be chosen for more bytes than there are, if the
        whole then fits, or for fewer: looks for the most bytes."""
        parts = self.parts(sized)
        found: Policy | None = None
        low: int | None = None  # bytes for which the choices fit, or for which there are none
        high: int | None = None  # bytes for which they do not fit
        aim = target
        for _ in range(CORRECTIONS):
            numbers = cheapest(parts.choices, aim)
            if numbers is None:
                low, following = aim, aim + parts.most_too_high
            else:
                policy = chosen(parts.by_unit(numbers), sized)
                spare = target - self.candidate(policy).peak
                following = aim + spare
                if spare < 0:
                    high = aim
                elif policy == found:
                    break
                else:
                    low, found = aim, policy
            if low is not None and high is not None:
                following = (low + high) // 2
            if following == aim:
                break
            aim = following
        fitting = [policy for policy in self._alike(sized) if self.candidate(policy).peak <= target]
        return min([found, *fitting] if found else fitting, key=self.cost, default=None)

    def _improved(self, start: Policy, best: Policy, target: int, tries: int) -> tuple[Policy, int]:
        """The best so far, or choices that are cheaper and fit: like the start, but for one unit or two. With the
        number of tries that are left."""
        parts = self.parts(start)
        moves = self._moves(parts, start, best, target)
        while tries and (move := next(moves, None)) is not None:
            tries -= move not in self.evaluated
            if self.cost(move) < self.cost(best) and self.candidate(move).peak <= target:
                start = best = move
                moves = self._moves(parts, start, best, target)
        return best, tries

    def _moves(self, parts: Parts, start: Policy, best: Policy, target: int) -> Iterator[Policy]:
        """Choices that differ from the start in one unit or two and should be cheaper than the best: first those that
        should fit, by cost, then by the bytes that should be missing."""
        now = parts.numbers(start.keep_unsharded, start.recompute_units)
        peak, cost = parts.sums(now)
        peak, cost = self.candidate(start).peak - peak, self.cost(start) - cost  # what the sums leave out
        found, most = [], self.cost(best)
        for numbers in _neighbours(now, len(parts.options)):
            of_parts = parts.sums(numbers)
            excess = of_parts[0] + peak - target
            if of_parts[1] + cost < most:
                found.append((max(excess, 0), of_parts[1], numbers))
        for _, _, numbers in sorted(found):
            yield chosen(parts.by_unit(numbers), start)


def chosen(choices: Mapping[str, UnitChoice], sized: Policy) -> Policy:
    """A policy with these choices for units."""
    kept = tuple(unit for unit, choice in choices.items() if choice.kept)
    return replace(sized, keep_unsharded=kept, recompute_units=tuple(u for u, one in choices.items() if one.recomputed))


def _neighbours(numbers: tuple[int, ...], options: int) -> Iterator[tuple[int, ...]]:
    """The numbers with one or two changed. The first and the last are not for units, and stay."""
    inner = range(1, len(numbers) - 1)
    for places in (*((at,) for at in inner), *combinations(inner, 2)):
        for others in product(range(options), repeat=len(places)):
            if all(numbers[at] != other for at, other in zip(places, others, strict=True)):
                changed = dict(zip(places, others, strict=True))
                yield tuple(changed.get(at, number) for at, number in enumerate(numbers))

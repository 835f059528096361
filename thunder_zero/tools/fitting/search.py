"""Searches the choices of units that fit into a number of bytes, on one lifted timeline.

First each choice is evaluated for all units alike, which shows what a unit leaves for backward and needs there.
``budget.py`` chooses from that, and the chosen schedule is evaluated. If it needs more bytes than the sum of its parts,
or fewer, the search chooses again. Then it tries cheaper choices for single units and for pairs.
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

Overhead = Callable[[Policy], int]  # bytes of a step that the estimate leaves out; they depend on sizes of buckets

CORRECTIONS = 8  # times, at most, that choices are made for another number of bytes
TRIES = 24  # cheaper choices for one unit or two that are evaluated, at most
FINEST = 500  # the search for the least stops at steps of this fraction of the bytes


@dataclass(frozen=True)
class Search:
    """The candidates for one program.

    Attributes:
        lifted: the program's timeline before any pass.
        asked: the policy as asked for.
        prices: the cost of recomputed work and of launches.
        tell: is called before a candidate is evaluated, with the number of candidates so far.
        evaluated: candidates by policy.
    """

    lifted: Timeline
    asked: Policy
    prices: Prices = USUAL_PRICES
    tell: Callable[[int], None] = lambda count: None
    evaluated: dict[Policy, Candidate] = field(default_factory=dict)

    def candidate(self, policy: Policy) -> Candidate:
        """Return the candidate of a policy, evaluated once."""
        if policy not in self.evaluated:
            self.tell(len(self.evaluated))
            self.evaluated[policy] = Candidate(self.lifted, policy, self.prices)
        return self.evaluated[policy]

    def cost(self, policy: Policy) -> float:
        """Return the cost of a policy's work."""
        return self.candidate(policy).cost

    def best(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """Return the cheapest policy that takes at most ``memory_bytes``; among equals that of the largest buckets."""
        best, tries = None, TRIES
        for policy in sorted(self._fitting(memory_bytes, overhead), key=self.cost):
            target = memory_bytes - overhead(policy)
            best, tries = self._improve(policy, best or policy, target, tries)
        return best

    def about(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """Return a policy nearly as cheap as :meth:`best` does, from fewer candidates."""
        return min(self._fitting(memory_bytes, overhead), key=self.cost, default=None)

    def least(self, overhead: Overhead) -> Policy:
        """Return the policy that takes the fewest bytes, as far as the search finds it. Units may differ.

        Its sizes of buckets are the best for units that are alike.
        """
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
        """Return the policy that takes the fewest bytes among those that make one of the choices for all units."""
        tried = [self.alike(choice, sized) for choice in options for sized in self.sized]
        return min(tried, key=lambda policy: self._total(policy, overhead))

    def _total(self, policy: Policy, overhead: Overhead) -> int:
        """Return the bytes that a step takes."""
        return self.candidate(policy).peak + overhead(policy)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units to choose for, in the order of forward."""
        return self.candidate(with_choices({}, self.sized[0])).units

    @cached_property
    def sized(self) -> tuple[Policy, ...]:
        """The policy as asked for, with its sizes, and with smaller ones: two units in flight, one, none."""
        sizes, largest = self.lifted.plan.sizes, self.lifted.plan.largest_unit_bytes
        smaller = [(min(sizes.bucket_bytes, in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0)]
        pairs = [(sizes.bucket_bytes, sizes.in_flight_bytes)]
        pairs += [(bucket, in_flight) for bucket, in_flight in smaller if in_flight < sizes.in_flight_bytes]
        return tuple(replace(self.asked, bucket_bytes=bucket, in_flight_bytes=size) for bucket, size in pairs)

    def parts(self, sized: Policy) -> Parts:
        """Return what each choice for each unit leaves, needs and costs."""
        return Parts.read_off(self.units, self._options, [self.candidate(policy) for policy in self._alike(sized)])

    @property
    def _options(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit; among equals the first is taken. If the stage keeps all unsharded, no choice does."""
        return (*(() if STAGES[self.asked.stage].kept_unsharded else (KEPT, KEPT_AND_RECOMPUTED)), PLAIN, RECOMPUTED)

    def alike(self, choice: UnitChoice, sized: Policy) -> Policy:
        """Return the policy that makes one choice for all units."""
        return with_choices(dict.fromkeys(self.units, choice), sized)

    def _alike(self, sized: Policy) -> list[Policy]:
        """Return the policies that make one of the options for all units."""
        return [self.alike(choice, sized) for choice in self._options]

    def _fitting(self, memory_bytes: int, overhead: Overhead) -> list[Policy]:
        """Return a cheap policy that fits for each size of buckets, where there is one."""
        policies = (self._fitting_of(sized, memory_bytes - overhead(sized)) for sized in self.sized)
        return [policy for policy in policies if policy is not None]

    def _fitting_of(self, sized: Policy, target: int) -> Policy | None:
        """Return the cheapest policy that fits into ``target`` bytes, as far as its parts tell; None if none fits.

        The whole may need more or fewer bytes than its parts add up to. So this looks for the largest number of bytes
        to choose the parts for (``aim``) with which the whole fits.
        """
        parts = self.parts(sized)
        best: Policy | None = None
        low: int | None = None  # an aim with which the whole fits, or for which there is no choice
        high: int | None = None  # an aim with which the whole does not fit
        aim = target
        for _ in range(CORRECTIONS):
            numbers = cheapest(parts.choices, aim)
            if numbers is None:
                low, following = aim, aim + parts.most_too_high
            else:
                policy = with_choices(parts.by_unit(numbers), sized)
                spare = target - self.candidate(policy).peak
                following = aim + spare
                if spare < 0:
                    high = aim
                elif policy == best:
                    break
                else:
                    low, best = aim, policy
            if low is not None and high is not None:
                following = (low + high) // 2
            if following == aim:
                break
            aim = following
        fitting = [policy for policy in self._alike(sized) if self.candidate(policy).peak <= target]
        return min([best, *fitting] if best else fitting, key=self.cost, default=None)

    def _improve(self, start: Policy, best: Policy, target: int, tries: int) -> tuple[Policy, int]:
        """Change the choices of one unit or two as long as that is cheaper and fits.

        Return the best policy, and the number of tries that are left.
        """
        parts = self.parts(start)
        moves = self._moves(parts, start, best, target)
        while tries and (move := next(moves, None)) is not None:
            tries -= move not in self.evaluated
            if self.cost(move) < self.cost(best) and self.candidate(move).peak <= target:
                start = best = move
                moves = self._moves(parts, start, best, target)
        return best, tries

    def _moves(self, parts: Parts, start: Policy, best: Policy, target: int) -> Iterator[Policy]:
        """Yield policies that differ from ``start`` in one unit or two, and should be cheaper than ``best``.

        Those that should fit come first, the cheapest first; then those that should miss the fewest bytes.
        """
        now = parts.numbers(start.keep_unsharded, start.recompute_units)
        peak, cost = parts.sums(now)
        peak, cost = self.candidate(start).peak - peak, self.cost(start) - cost  # what the sums leave out
        moves, most = [], self.cost(best)
        for numbers in _neighbours(now, len(parts.options)):
            peak_of_parts, cost_of_parts = parts.sums(numbers)
            excess = peak_of_parts + peak - target
            if cost_of_parts + cost < most:
                moves.append((max(excess, 0), cost_of_parts, numbers))
        for _, _, numbers in sorted(moves):
            yield with_choices(parts.by_unit(numbers), start)


def with_choices(choices: Mapping[str, UnitChoice], sized: Policy) -> Policy:
    """Return a policy with the choices, by unit."""
    kept = tuple(unit for unit, choice in choices.items() if choice.kept)
    recomputed = tuple(unit for unit, choice in choices.items() if choice.recomputed)
    return replace(sized, keep_unsharded=kept, recompute_units=recomputed)


def _neighbours(numbers: tuple[int, ...], options: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers with one or two changed. The first and the last stay, as they belong to no unit."""
    inner = range(1, len(numbers) - 1)
    for places in (*((index,) for index in inner), *combinations(inner, 2)):
        for others in product(range(options), repeat=len(places)):
            if all(numbers[index] != other for index, other in zip(places, others, strict=True)):
                changed = dict(zip(places, others, strict=True))
                yield tuple(changed.get(index, number) for index, number in enumerate(numbers))

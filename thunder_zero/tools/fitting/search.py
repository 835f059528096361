"""Searches choices for units so that a step fits into a number of bytes. Uses one lifted timeline.

First each choice is evaluated for all units at once, which gives the bytes and the cost of each unit. ``budget.py``
combines choices, and the resulting schedule is evaluated. If the bytes of the schedule differ from the sum of its
parts, the search combines choices again. Then it tries cheaper choices for single units and for pairs.
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

Overhead = Callable[[Policy], int]  # the bytes that the estimate for a policy leaves out

CORRECTIONS = 8  # the most corrected numbers of bytes to choose for
TRIES = 24  # the most evaluations of cheaper choices for one unit or two
FINEST = 500  # the relative precision of the least bytes is 1 / FINEST


@dataclass(frozen=True)
class Search:
    """The candidates for one program."""

    lifted: Timeline  # the program's timeline before any pass
    asked: Policy  # the requested policy
    prices: Prices = USUAL_PRICES  # the prices of recomputed work and of launches
    # a function that is called with the number of candidates before each evaluation
    tell: Callable[[int], None] = lambda count: None
    evaluated: dict[Policy, Candidate] = field(default_factory=dict)  # a mapping from policies to candidates

    def candidate(self, policy: Policy) -> Candidate:
        """Return the candidate of a policy. Each policy is evaluated once."""
        if policy not in self.evaluated:
            self.tell(len(self.evaluated))
            self.evaluated[policy] = Candidate(self.lifted, policy, self.prices)
        return self.evaluated[policy]

    def cost(self, policy: Policy) -> float:
        """Return the cost of a policy's work."""
        return self.candidate(policy).cost

    def best(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """Return the cheapest policy within ``memory_bytes``. At equal cost, prefer the largest buckets."""
        best, tries = None, TRIES
        for policy in sorted(self._fitting(memory_bytes, overhead), key=self.cost):
            target = memory_bytes - overhead(policy)
            best, tries = self._improve(policy, best or policy, target, tries)
        return best

    def about(self, memory_bytes: int, overhead: Overhead) -> Policy | None:
        """Return a policy nearly as cheap as the result of :meth:`best`, from fewer evaluations."""
        return min(self._fitting(memory_bytes, overhead), key=self.cost, default=None)

    def least(self, overhead: Overhead) -> Policy:
        """Return the policy with the fewest bytes that the search finds. Units may have different choices.

        The bucket sizes are the sizes with the fewest bytes when all units have one choice.
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
        """Return the policy with the fewest bytes, among policies that have one choice for all units."""
        tried = [self.alike(choice, sized) for choice in options for sized in self.sized]
        return min(tried, key=lambda policy: self._total(policy, overhead))

    def _total(self, policy: Policy, overhead: Overhead) -> int:
        return self.candidate(policy).peak + overhead(policy)

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units that need a choice, in the order of forward."""
        return self.candidate(with_choices({}, self.sized[0])).units

    @cached_property
    def sized(self) -> tuple[Policy, ...]:
        """The requested policy, and copies with fewer bytes in flight: the bytes of two units, of one unit, and 0."""
        plan = self.lifted.plan
        sizes, largest = plan.sizes, max(plan.unit_bytes.values(), default=0)
        smaller = [(min(sizes.bucket_bytes, in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0)]
        pairs = [(sizes.bucket_bytes, sizes.in_flight_bytes)]
        pairs += [(bucket, in_flight) for bucket, in_flight in smaller if in_flight < sizes.in_flight_bytes]
        return tuple(replace(self.asked, bucket_bytes=bucket, in_flight_bytes=size) for bucket, size in pairs)

    def parts(self, sized: Policy) -> Parts:
        """Return the bytes and the cost of each choice for each unit."""
        return Parts.read_off(self.units, self._options, [self.candidate(policy) for policy in self._alike(sized)])

    @property
    def _options(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit, in order of preference. KEPT is omitted if the stage keeps all units gathered."""
        return (*(() if STAGES[self.asked.stage].kept_unsharded else (KEPT, KEPT_AND_RECOMPUTED)), PLAIN, RECOMPUTED)

    def alike(self, choice: UnitChoice, sized: Policy) -> Policy:
        """Return the policy with one choice for all units."""
        return with_choices(dict.fromkeys(self.units, choice), sized)

    def _alike(self, sized: Policy) -> list[Policy]:
        return [self.alike(choice, sized) for choice in self._options]

    def _fitting(self, memory_bytes: int, overhead: Overhead) -> list[Policy]:
        """Return a cheap policy for each bucket size with which a policy fits."""
        policies = (self._fitting_of(sized, memory_bytes - overhead(sized)) for sized in self.sized)
        return [policy for policy in policies if policy is not None]

    def _fitting_of(self, sized: Policy, target: int) -> Policy | None:
        """Return the cheapest policy for ``target`` bytes, judged by the parts of the step; None if no policy fits.

        A step may need more or fewer bytes than the sum of its parts. So the search chooses parts for ``aim`` bytes,
        and finds the largest ``aim`` for which the step fits.
        """
        parts = self.parts(sized)
        best: Policy | None = None
        low: int | None = None  # an aim for which the step fits, or no choice exists
        high: int | None = None  # an aim for which the step does not fit
        aim = target
        for _ in range(CORRECTIONS):
            numbers = cheapest(parts.choices, aim)
            if numbers is None:
                low, next_aim = aim, aim + parts.most_too_high
            else:
                policy = with_choices(parts.by_unit(numbers), sized)
                spare = target - self.candidate(policy).peak
                next_aim = aim + spare
                if spare < 0:
                    high = aim
                elif policy == best:
                    break
                else:
                    low, best = aim, policy
            if low is not None and high is not None:
                next_aim = (low + high) // 2
            if next_aim == aim:
                break
            aim = next_aim
        fitting = [policy for policy in self._alike(sized) if self.candidate(policy).peak <= target]
        return min([best, *fitting] if best else fitting, key=self.cost, default=None)

    def _improve(self, start: Policy, best: Policy, target: int, tries: int) -> tuple[Policy, int]:
        """Change the choices of one or two units while the result fits and gets cheaper.

        Return the best policy, and the remaining number of tries.
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
        """Yield policies that differ from ``start`` in one or two units and are estimated cheaper than ``best``.

        First come policies that are estimated to fit, from the cheapest. Then come policies that exceed ``target``,
        from the smallest excess.
        """
        start_numbers = parts.numbers(start.keep_unsharded, start.recompute_units)
        peak, cost = parts.sums(start_numbers)
        peak, cost = self.candidate(start).peak - peak, self.cost(start) - cost  # differences from the sums
        moves, best_cost = [], self.cost(best)
        for numbers in _neighbours(start_numbers, len(parts.options)):
            peak_of_parts, cost_of_parts = parts.sums(numbers)
            excess = peak_of_parts + peak - target
            if cost_of_parts + cost < best_cost:
                moves.append((max(excess, 0), cost_of_parts, numbers))
        for _, _, numbers in sorted(moves):
            yield with_choices(parts.by_unit(numbers), start)


def with_choices(choices: Mapping[str, UnitChoice], sized: Policy) -> Policy:
    """Return a policy with these choices, keyed by unit."""
    kept = tuple(unit for unit, choice in choices.items() if choice.kept)
    recomputed = tuple(unit for unit, choice in choices.items() if choice.recomputed)
    return replace(sized, keep_unsharded=kept, recompute_units=recomputed)


def _neighbours(numbers: tuple[int, ...], options: int) -> Iterator[tuple[int, ...]]:
    """Yield option indices with one or two changes. The first and the last index have no unit and never change."""
    inner = range(1, len(numbers) - 1)
    for indices in (*((index,) for index in inner), *combinations(inner, 2)):
        for new_numbers in product(range(options), repeat=len(indices)):
            if all(numbers[index] != new_number for index, new_number in zip(indices, new_numbers, strict=True)):
                changed = dict(zip(indices, new_numbers, strict=True))
                yield tuple(changed.get(index, number) for index, number in enumerate(numbers))

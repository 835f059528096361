"""Searches choices for units so that a step fits into a number of bytes at the least cost.

A candidate is a schedule of the program, with bytes and a cost for each unit. Each choice is evaluated on a candidate
that applies this choice to all units. In both phases of a unit, all earlier units hold their bytes for backward. So
choices for the units a, b, c, in the order of forward, fit if::

    a.peak                       <= budget
    a.left + b.peak              <= budget
    a.left + b.left + c.peak     <= budget

If the bytes of the resulting schedule differ from the sum of its parts, the search combines choices again. No schedule
keeps further units by itself (``Policy.reshard_after_forward``) until the choices are made.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from thunder_zero.plan.amounts import itemsize
from thunder_zero.plan.params import ROOT
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.schedule.ops import Gather, Launch, Op
from thunder_zero.schedule.timeline import Timeline
from thunder_zero.schedule.units import backward_ends, runs
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.recorder import Recorder

FLOPS_PER_BYTE = 1000.0  # about the ratio of FLOP/s to B/s, both for an H100 with NVLink and for a CPU on 1 Gbit/s
LAUNCH_BYTES = 128 << 10  # the price of a launch, in addition to its bytes: about a millisecond at 1 Gbit/s


class UnitCost(NamedTuple):
    """The bytes and the cost of a unit in both phases, of the loss, or of the end of backward."""

    left: int  # bytes that the unit holds from its forward to its backward
    peak: int  # the most bytes alive in it, without bytes that earlier units hold for backward
    cost: float  # the cost of its work, in bytes on the wire


@dataclass(frozen=True)
class Candidate:
    """A schedule of a program, the price of recomputed work, and bytes to add to the peak."""

    recorder: Recorder  # what the program's lines do to memory
    timeline: Timeline  # the operations that would run
    flops_per_byte: float = FLOPS_PER_BYTE
    reserve: int = 0

    @property
    def policy(self) -> Policy:
        return self.timeline.plan.policy

    @cached_property
    def fold(self) -> Fold:
        return Fold(self.recorder, self.timeline).run()

    @property
    def peak(self) -> int:
        """The most bytes alive in forward, the loss and backward."""
        return self.fold.peak + self.reserve

    @cached_property
    def sent(self) -> int:
        return sum(self.timeline.traffic(op).sent for op in self.timeline.ops)

    @cached_property
    def flops(self) -> int:
        return sum(sum(self.timeline.repeats(op)) for op in self.timeline.ops)

    @cached_property
    def cost(self) -> int:
        """The cost of gathers, reductions and recomputed work, in bytes on the wire."""
        return round(sum(map(self._cost, self.timeline.ops)))

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units with gradients, in the order of forward, without the root."""
        return tuple(reversed(backward_ends(self.timeline)))

    @cached_property
    def kept(self) -> frozenset[str]:
        """The units, without the root, that stay gathered: ``Policy`` names them, and the schedule may add some."""
        plan = self.timeline.plan
        return frozenset(plan.by_name[path].unit for path in plan.kept_unsharded) - {ROOT}

    @cached_property
    def parts(self) -> tuple[UnitCost, ...]:
        """The end of backward, each unit in the order of forward, and the loss.

        The beginnings of forward and of backward belong to the next unit, the end of forward to the last.
        """
        ops, start, ends = self.timeline.ops, self.timeline.backward_start, backward_ends(self.timeline)
        units, stops = (*ends, ROOT), [*ends.values()]
        runs_of_units = [run for run in runs(self.timeline) if run.unit in ends]
        ran, begins = [run.unit for run in runs_of_units] or [ROOT], [run.first for run in runs_of_units[1:]]
        unit_at = {id(op): ran[bisect_right(begins, index)] for index, op in enumerate(ops[:start])} | {
            id(op): units[bisect_left(stops, index)] for index, op in enumerate(ops[start:], start)
        }
        costs, peaks, left = Counter[str](), Counter[str](), Counter[str]()
        for op in ops[start:]:
            unit = self.timeline.params_of(op)[0].unit if isinstance(op, Gather) else unit_at[id(op)]
            costs[unit] += self._cost(op)  # type: ignore[assignment]
        lines, phases = self.fold.lines, [*(line.phase for line in self.fold.lines), ""]
        owners = [unit_at.get(id(line.op), units[0] if line.phase == "backward" else line.phase) for line in lines]
        for unit, line in zip(owners, lines, strict=True):
            peaks[unit] = max(peaks[unit], line.highest)
        for storage in self.fold.allocations:
            freed_by = storage.freed_by or 0
            if phases[storage.line] == "forward" and phases[freed_by] == "backward":
                left[owners[freed_by]] += storage.nbytes
        parts, earlier = [UnitCost(0, peaks[ROOT], 0.0)], 0
        for unit in self.units:
            parts.append(UnitCost(left[unit], peaks[unit] - earlier, costs[unit]))
            earlier += left[unit]
        return (*parts, UnitCost(0, peaks["loss"] - earlier, 0.0))

    def _cost(self, op: Op) -> float:
        launch = LAUNCH_BYTES * isinstance(op, Launch)
        return self.timeline.traffic(op).sent + launch + flops_to_repeat(op, self.timeline) / self.flops_per_byte


def flops_to_repeat(op: Op, timeline: Timeline) -> int:
    """Return the FLOPs that an operation repeats. Repeated work without FLOPs costs the number of written elements."""
    repeats = timeline.repeats(op)
    values = (timeline.values[name] for name in op.writes if repeats and name in timeline.values)
    return sum(repeats) or max((value.nbytes // itemsize(value.dtype) for value in values), default=0)


MOST_PARTIAL = 20_000  # with more partial choices, bytes are rounded up to a thousandth of the budget
CORRECTIONS = 8  # the most corrected numbers of bytes to choose for
FINEST = 500  # the relative precision of the least bytes is 1 / FINEST

Partial = tuple[int, float, tuple[int, ...]]  # choices for the first units: bytes left, cost, option indices


def cheapest(units: Sequence[Sequence[UnitCost]], budget: int) -> tuple[int, ...] | None:
    """Return the cheapest choices that fit the budget, as an index for each unit; None if no choices fit."""
    partial: list[Partial] = [(0, 0.0, ())]
    for choices in units:
        longer = [
            (left + choice.left, cost + choice.cost, (*chosen, index))
            for left, cost, chosen in partial
            for index, choice in enumerate(choices)
            if left + choice.peak <= budget
        ]
        partial = _unbeaten(longer, 1)
        if len(partial) > MOST_PARTIAL:
            partial = _unbeaten(partial, max(budget // 1000, 1))
    return min(partial, key=lambda choices: choices[1])[2] if partial else None


def _unbeaten(partial: list[Partial], grain: int) -> list[Partial]:
    """Drop each partial choice if another has no higher cost and no more bytes (rounded up to ``grain``)."""
    unbeaten: list[Partial] = []
    least = float("inf")
    for choices in sorted((-(-left // grain) * grain, cost, chosen) for left, cost, chosen in partial):
        if choices[1] < least:
            unbeaten.append(choices)
            least = choices[1]
    return unbeaten


# whether a unit stays gathered for backward (``Policy.keep_unsharded``), and whether backward recomputes it as a whole
UnitChoice = tuple[bool, bool]  # (``Policy.recompute_units``)
CHOICES: tuple[UnitChoice, ...] = ((True, False), (True, True), (False, False), (False, True))


@dataclass(frozen=True)
class Search:
    """The candidates for one program."""

    recorder: Recorder  # what the program's lines do to memory
    asked: Policy  # the requested policy
    schedule: Callable[[Policy], Timeline]  # the program's operations under a policy
    flops_per_byte: float = FLOPS_PER_BYTE  # FLOPs of recomputed work that cost as much as one byte
    reserve: int = 0  # bytes to add to every peak
    evaluated: dict[Policy, Candidate] = field(default_factory=dict)  # a mapping from policies to candidates

    def candidate(self, policy: Policy) -> Candidate:
        """Return the candidate of a policy. Each policy is evaluated once."""
        if policy not in self.evaluated:
            self.evaluated[policy] = Candidate(self.recorder, self.schedule(policy), self.flops_per_byte, self.reserve)
        return self.evaluated[policy]

    def alike(self, choice: UnitChoice, sized: Policy) -> Candidate:
        return self.candidate(with_choices(dict.fromkeys(self.units, choice), sized))

    def best(self, memory_bytes: int) -> Candidate | None:
        """Return the cheapest candidate within ``memory_bytes``. At equal cost, prefer the largest buckets."""
        best = _cheapest(self._best_sized(sized, memory_bytes) for sized in self.sized)
        if best is None:
            return None
        # the schedule may keep further parameters, as requested, if this is not more expensive
        relaxed = self.candidate(replace(best.policy, reshard_after_forward=self.asked.reshard_after_forward))
        return relaxed if relaxed.peak <= memory_bytes and relaxed.cost <= best.cost else best

    def least(self) -> Candidate:
        """Return the candidate with the fewest bytes that the search finds. Units may have different choices."""
        alike = (self.alike(choice, sized) for choice in self.options for sized in self.sized)
        best = min(alike, key=lambda candidate: candidate.peak)  # its bucket sizes are kept
        step = best.peak // 8
        while step > best.peak // FINEST:
            lower = self._best_sized(best.policy, best.peak - step)
            step, best = (step // 4, best) if lower is None else (step, lower)
        return best

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The units that need a choice, in the order of forward."""
        return self.candidate(with_choices({}, self.sized[0])).units

    @cached_property
    def sized(self) -> tuple[Policy, ...]:
        """The requested policy, and copies with fewer bytes in flight: the bytes of two units, of one unit, and 0.

        Their schedules keep no units but those that the search names.
        """
        plan = self.recorder.traces.lifted.plan
        sizes, largest = plan.sizes, max(plan.unit_bytes.values(), default=0)
        smaller = [(min(sizes.bucket_bytes, in_flight // 2), in_flight) for in_flight in (2 * largest, largest, 0)]
        pairs = [(sizes.bucket_bytes, sizes.in_flight_bytes)]
        pairs += [(bucket, in_flight) for bucket, in_flight in smaller if in_flight < sizes.in_flight_bytes]
        keeps_all = STAGES[self.asked.stage].kept_unsharded
        asked = self.asked if keeps_all else replace(self.asked, reshard_after_forward=True)
        return tuple(replace(asked, bucket_bytes=bucket, in_flight_bytes=size) for bucket, size in pairs)

    @property
    def options(self) -> tuple[UnitChoice, ...]:
        """The choices for a unit, in order of preference. None keeps units if the stage keeps all gathered."""
        keeps_all = STAGES[self.asked.stage].kept_unsharded
        return tuple((kept, again) for kept, again in CHOICES if not (keeps_all and kept))

    def _best_sized(self, sized: Policy, most: int) -> Candidate | None:
        """Return the cheapest candidate within ``most`` bytes, judged by the parts of the step; None if none fits.

        A step may need more or fewer bytes than the sum of its parts. So the search chooses parts for ``aim`` bytes,
        and finds the largest ``aim`` for which the step fits.
        """
        alike = [self.alike(choice, sized) for choice in self.options]
        (*end,), *units, (*loss,) = zip(*(candidate.parts for candidate in alike), strict=True)
        parts = [[max(end, key=lambda part: part.peak)], *units, [max(loss, key=lambda part: part.peak)]]
        found = [candidate for candidate in alike if candidate.peak <= most]
        aim, low, high = most, 0, 2 * most
        for _ in range(CORRECTIONS):
            numbers = cheapest(parts, aim)
            if numbers is None:
                low, spare = aim, 0
            else:
                choices = [self.options[number] for number in numbers[1:-1]]
                candidate = self.candidate(with_choices(dict(zip(self.units, choices, strict=True)), sized))
                spare = most - candidate.peak
                if spare < 0:
                    high = aim
                elif candidate in found:
                    break
                else:
                    low = aim
                    found.append(candidate)
            aim = aim + spare if low < aim + spare < high and spare else (low + high) // 2
        return _cheapest(found)


def _cheapest(candidates: Iterable[Candidate | None]) -> Candidate | None:
    found = (candidate for candidate in candidates if candidate is not None)
    return min(found, key=lambda candidate: candidate.cost, default=None)


def with_choices(choices: Mapping[str, UnitChoice], sized: Policy) -> Policy:
    kept, recomputed = (tuple(unit for unit, choice in choices.items() if choice[number]) for number in (0, 1))
    return replace(sized, keep_unsharded=kept, recompute_units=recomputed)

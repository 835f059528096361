"""``tz.fit``: the cheapest policy whose step fits into memory.

Candidates are evaluated on the lifted timeline: the passes run with each candidate's policy, and ``alive.py`` estimates
the bytes. The difference from the exact forecast (``tz.memory``) of one compilation corrects the estimate.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import IO, Any

from rich.console import Console
from torch import nn

from thunder_zero.comm.decide import on_rank_0, ranks_of_default_group
from thunder_zero.compiled import Traces
from thunder_zero.dry_run import trace
from thunder_zero.forecast.figures import Memory
from thunder_zero.forecast.kinds import Holds
from thunder_zero.forecast.memory import memory
from thunder_zero.plan import ROOT
from thunder_zero.policy import STAGES, ZERO3, Policy, is_count
from thunder_zero.report.trace_printer import size
from thunder_zero.report.trade import Trade, print_trade
from thunder_zero.schedule.budget import Choice, cheapest
from thunder_zero.schedule.candidate import Candidate
from thunder_zero.schedule.timeline import Timeline

COMPILATIONS = 3  # that confirm a choice
CORRECTIONS = 8  # of a choice whose parts add up to more than it was chosen for
TRIES = 24  # of cheaper choices for single units
STEPS = 7  # of the printed trade

Forecast = Callable[[Policy], tuple[Traces, Memory]]


class DoesNotFit(ValueError):
    """No policy fits. The message says by how many bytes, what makes the peak, and what would help."""


def fit(
    module: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    memory_bytes: int,
    world_size: int | None = None,
    policy: Policy | int = ZERO3,
    file: IO[str] | None = None,
    reserve: int = 0,
    **figures: Any,
) -> Policy:
    """The policy whose forecast peak fits into ``memory_bytes`` and whose step costs least.

    Decides for each unit whether it stays gathered from forward to backward (``Policy.keep_units``) and whether it is
    computed again whole (``Policy.recompute_units``), and for all the bytes of buckets and in flight. The cost is the
    bytes that a rank sends, with a thousand FLOPs of work done again as much as a byte. Prints what further memory
    would save. Under ``torchrun`` every rank calls it, and rank 0 decides.

    >>> policy = tz.fit(model, (tokens,), memory_bytes=40 << 30, world_size=8, optimizer=torch.optim.AdamW)
    >>> model = thunder.jit(model, transforms=[tz.ZeroTransform(policy)])

    Args:
        module: a plain module; it may be on the meta device.
        inputs: the arguments of its forward: a sequence, or a mapping of keyword arguments.
        memory_bytes: what the peak of a step, the optimizer's included, may take on a rank.
        world_size: number of ranks; None: those of the default process group.
        policy: what else to ask for, such as the stage (default: ZeRO-3).
        file: where to print; the standard output if None.
        reserve: bytes that the forecast cannot see.
        figures: ``loss``, ``optimizer`` and ``backend`` of :func:`thunder_zero.memory`.

    Raises:
        DoesNotFit: no policy fits; a ValueError.
        ValueError: ``memory_bytes`` or ``world_size`` is not a number of bytes, or of ranks.
    """
    if not is_count(memory_bytes) or not memory_bytes:
        raise ValueError(f"memory_bytes is {memory_bytes!r}; give a number of bytes, such as 40 << 30")
    asked = policy if isinstance(policy, Policy) else Policy(policy)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})

    ranks = ranks_of_default_group() if world_size is None else world_size
    if ranks is None:
        raise ValueError("world_size is None, and there is no process group; give the number of ranks")

    def forecast(candidate: Policy) -> tuple[Traces, Memory]:
        traces = trace(module, *args, policy=candidate, world_size=ranks, **kwargs)
        return traces, memory(traces, reserve=reserve, **figures)

    console = Console(file=file, width=100)
    return on_rank_0("tz.fit", lambda: _decided(forecast, asked, memory_bytes, console)).policy(asked)


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen, as paths of units and bytes."""

    keep_units: tuple[str, ...]
    recompute_units: tuple[str, ...]
    bucket_bytes: int
    in_flight_bytes: int

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

    def best(self, target: int) -> Choices | None:
        """The cheapest choices with at most ``target`` bytes alive, and among equals those with the largest buckets."""
        found = [choices for sizes in self.sizes if (choices := self._best_of(sizes, target)) is not None]
        return min(found, key=lambda choices: self.candidate(choices).cost, default=None)

    @cached_property
    def least(self) -> int:
        """The fewest bytes alive that any choice was found to need."""
        most_again = self.candidate(_choices({}, self.sizes[-1])).units
        tried = (_choices(dict.fromkeys(most_again, name), sizes) for name in ("", "again") for sizes in self.sizes)
        return min(self.candidate(choices).peak for choices in tried)

    @cached_property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Bytes of a bucket and in flight: those that were asked for, and smaller ones: two units, one, nothing."""
        most = self.asked.bucket_bytes, self.asked.in_flight_bytes
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
        """The choices, with cheaper ones for single units while they fit: the sum of parts is never less than the
        whole, but may be more."""
        names = {unit: choices.name_of(unit) for unit, _ in units if unit != ROOT}
        tries = TRIES
        for unit, possible in units:
            for choice in sorted(possible, key=lambda one: one.cost):
                if unit == ROOT or choice.name == names[unit] or not tries:
                    break
                tries -= 1
                other = _choices(names | {unit: choice.name}, (choices.bucket_bytes, choices.in_flight_bytes))
                is_cheaper = self.candidate(other).cost < self.candidate(choices).cost
                if is_cheaper and self.candidate(other).peak <= target:
                    choices, names = other, names | {unit: choice.name}
        return choices

    def _units(self, sizes: tuple[int, int]) -> list[tuple[str, list[Choice]]]:
        """For each unit, in the order of forward, what each choice leaves, needs and costs, if all units choose alike;
        before them the end of backward, after them its beginning and forward."""
        options = ("", "again", *(("keep", "keep again") if not STAGES[self.asked.stage].gathered_once else ()))
        plain = self.candidate(_choices({}, sizes))
        alike = {name: self.candidate(_choices(dict.fromkeys(plain.units, name), sizes)) for name in options}
        begin = [Choice(0, max(_peak(one, one.segments[ROOT]) for one in alike.values()), 0.0)]
        units: list[tuple[str, list[Choice]]] = [(ROOT, begin)]
        for number, unit in enumerate(plain.units):
            choices = []
            for name, one in alike.items():
                earlier = sum(one.left[other] for other in plain.units[:number])
                own = _peak(one, one.segments[unit]) - earlier
                choices.append(Choice(one.left[unit], own, one.costs_of(unit), name))
            units.append((unit, choices))
        forward = max(
            max(one.alive[: one.segments[plain.units[-1]].start]) - sum(one.left.values()) for one in alike.values()
        )
        return [*units, (ROOT, [Choice(0, forward, 0.0)])]


def _decided(forecast: Forecast, asked: Policy, memory_bytes: int, console: Console) -> Choices:
    """Search, and confirm by compilations; print the trade."""
    traces, exact = forecast(asked)
    if traces.lifted is None or traces.backward is None:
        raise ValueError("nothing here needs a gradient, so there is no step to fit; call it outside torch.no_grad()")
    search = Search(traces.lifted, asked)
    asked_for = Choices(asked.keep_units, asked.recompute_units, asked.bucket_bytes, asked.in_flight_bytes)
    beside = exact.peak - search.candidate(asked_for).peak  # what the estimate leaves out
    stepping = exact.optimizer_step or 0
    target = memory_bytes - beside
    best: Choices | None = None
    for _ in range(COMPILATIONS):
        best = search.best(target) if stepping <= memory_bytes else None
        if best is None:
            raise DoesNotFit(_refusal(search, exact, beside, memory_bytes))
        peak = forecast(best.policy(asked))[1].peak
        if peak <= memory_bytes:
            break
        target -= peak - memory_bytes
    else:
        raise DoesNotFit(_refusal(search, exact, beside, memory_bytes))
    print_trade(list(_trade(search, beside, best)), console)
    return best


def _trade(search: Search, beside: int, best: Choices) -> Iterator[Trade]:
    """Choices from the least memory to the least cost, with the one that was made."""
    cheapest_of_all = search.best(sys.maxsize)
    assert cheapest_of_all is not None
    least, most = search.least, search.candidate(cheapest_of_all).peak
    targets = [least + (most - least) * step // (STEPS - 1) for step in range(STEPS)]
    found = dict.fromkeys(choices for target in targets if (choices := search.best(target)) is not None)
    cost = float("inf")
    for choices in sorted({*found, best}, key=lambda choices: search.candidate(choices).peak):
        one = search.candidate(choices)
        if one.cost >= cost and choices != best:
            continue
        cost = one.cost
        yield Trade(
            peak=one.peak + beside,
            sent=one.sent,
            flops=one.flops,
            cost=one.cost,
            kept=len(choices.keep_units),
            again=len(choices.recompute_units),
            in_flight_bytes=choices.in_flight_bytes,
            chosen=choices == best,
        )


def _refusal(search: Search, exact: Memory, beside: int, memory_bytes: int) -> str:
    """What is missing, what makes the peak, and what would help."""
    step = exact.optimizer_step or 0
    least = max(search.least + beside, step)
    kinds = ", ".join(f"{size(nbytes)} of {kind}" for kind, nbytes in list(exact.by_kind.items())[:3])
    at = exact.by_kind
    sharded = sum(at.get(kind, 0) for kind in (Holds.PARAMETER, Holds.OPTIMIZER, Holds.REDUCED_GRADIENT))
    batch = sum(at.get(kind, 0) for kind in (Holds.SAVED, Holds.TEMPORARY, Holds.LOSS))
    helps = [f"twice the ranks (about {size(sharded // 2)} less)", f"half the batch (up to {size(batch // 2)} less)"]
    if not search.asked.cpu_offload:
        helps.append(f"cpu_offload on GPUs ({size(sharded)} less)")
    return (
        f"no policy fits into {size(memory_bytes)}: the least that a step takes is {size(least)}, "
        f"{size(max(least - memory_bytes, 0))} more, with all units computed again and none kept"
        f"{'' if step < least else ' (its peak is in the optimizer)'}; the peak as asked for, {size(exact.peak)}, has "
        f"{kinds}; what would help: {', '.join(helps)}"
    )


def _peak(candidate: Candidate, positions: range) -> int:
    return max((candidate.alive[at] for at in positions), default=0)


def _choices(names: Mapping[str, str], sizes: tuple[int, int]) -> Choices:
    keep = tuple(unit for unit, name in names.items() if "keep" in name)
    again = tuple(unit for unit, name in names.items() if "again" in name)
    return Choices(keep, again, *sizes)

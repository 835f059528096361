"""The time and the memory of a step of the whole model, from the step of one with fewer blocks.

Finds a period in a sequence of signs, and where further periods belong. A model of n alike blocks is traced, and the
model has more. Where two periods of a phase in a row have the same signs, the phases of larger models have more of them
there::

    signs    a b | c d e | c d e | c d f g
    marks          ^       ^                     where blocks begin to compute
    longer   a b | c d e | c d e | c d e | c d f g

Each block more also adds what rests of it to every figure of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from thunder_zero.frontends.compiled import Traces
from thunder_zero.schedule.timeline import LAUNCHES, Kind, Op, Timeline
from thunder_zero.tools.cost.costs import Cost
from thunder_zero.tools.cost.estimate import Estimate, counts_fused, model_seconds, step_time
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.forecast.figures import AT_REST, Holds, Memory


@dataclass(frozen=True, slots=True)
class Stretch:
    """A period, in positions, and where it repeats: from the first position that is equal to the one a period later."""

    start: int
    period: int

    @property
    def end(self) -> int:
        """The position where further periods go: behind the first."""
        return self.start + self.period


def stretch_of(signs: Sequence[Hashable], marks: Sequence[int]) -> Stretch | None:
    """A period that occurs at least twice in a row, where the distance of two marks in a row is the period. Positions
    with equal signs are equal; the marks, ascending, are where the alike blocks begin."""
    found = [_around(signs, first, second - first) for first, second in pairwise(marks)]
    return next((stretch for stretch in found if stretch is not None), None)


def _around(signs: Sequence[Hashable], at: int, period: int) -> Stretch | None:
    """The longest run around a position, in which all are equal to those a period later."""
    if period <= 0 or signs[at] != signs[at + period]:
        return None
    start = stop = at
    while start and signs[start - 1] == signs[start - 1 + period]:
        start -= 1
    while stop + period < len(signs) and signs[stop] == signs[stop + period]:
        stop += 1
    return Stretch(start, period) if stop - start >= period else None


def positions(length: int, stretch: Stretch | None, copies: int) -> list[int]:
    """For each position of the longer sequence, the one that it has its sign from."""
    if stretch is None or not copies:
        return list(range(length))
    middle = list(range(stretch.start, stretch.end)) * copies
    return [*range(stretch.end), *middle, *range(stretch.end, length)]


def linked(at: int, source: int, link: int, stretch: Stretch | None, copies: int) -> int:
    """Where an earlier position that another refers to is in the longer sequence: ``at`` refers to it there, and has
    its sign from ``source``, which refers to ``link``. The others are as for :func:`positions`."""
    if stretch is not None and copies and source >= stretch.end and link < stretch.start:
        return link
    return at - (source - link)


class NotPeriodic(Exception):
    """The blocks in the middle do not do the same: trace more of them."""


def longer(signs: Sequence[Hashable], marks: Sequence[int], copies: int) -> tuple[list[int], Stretch | None]:
    """For each position of the longer sequence the one that it has its sign from; and the stretch that repeats. Raises
    NotPeriodic if nothing repeats, and something has to."""
    stretch = stretch_of(signs, marks) if copies else None
    if copies and stretch is None:
        raise NotPeriodic
    return positions(len(signs), stretch, copies), stretch


def _marks_of(timeline: Timeline, units: Sequence[str]) -> tuple[list[int], list[int]]:
    """Where operations of each phase first read parameters of each alike block together with data, ascending."""
    unit_of = {path: unit for path in timeline.plan.by_name for unit in units if path.startswith(f"{unit}.")}
    owner = {name: unit_of[path] for name, path in timeline.inputs.items() if path in unit_of}
    for op in timeline.ops:
        if timeline.ends(op, Kind.GATHER):
            pairs = zip(op.writes, op.params, strict=True)
            owner.update((name, unit_of[path]) for name, path in pairs if path in unit_of)
    found: dict[bool, dict[str, int]] = {False: {}, True: {}}
    for at, op in enumerate(timeline.ops[:-1]):
        if op.kind is not Kind.COMPUTE:
            continue
        read = {owner[name] for name in op.reads if name in owner}
        if len(read) == 1 and all(name in owner for name in op.reads):  # a view or a cast of parameters alone
            owner.update(dict.fromkeys(op.writes, *read))
            continue
        for unit in read:
            found[op.backward].setdefault(unit, at)
    return sorted(found[False].values()), sorted(found[True].values())


def _phases(timeline: Timeline, units: Sequence[str]) -> Iterator[tuple[range, list[int]]]:
    """The positions of each phase, and in it where the alike blocks begin to compute."""
    forward, backward = _marks_of(timeline, units)
    yield range(timeline.backward_start), forward
    yield range(timeline.backward_start, len(timeline.ops)), [at - timeline.backward_start for at in backward]


def estimate_whole(traces: Traces, device: Device, units: Sequence[str], copies: int) -> Estimate:
    """The estimate of a step with ``copies`` more of these blocks than were traced; NotPeriodic if none repeats."""
    timeline, lifted = traces.timeline, traces.lifted or traces.timeline
    traced = step_time(timeline, device, fused=counts_fused(traces, device), model=lifted)
    if not copies:
        return traced
    ops, costs = _longer(timeline, traced.costs, units, copies)
    model = _total(lifted, model_seconds(lifted, device), units, copies)
    return replace(traced, timeline=replace(timeline, ops=ops), costs=costs, model_seconds=model)


def _longer(
    timeline: Timeline, costs: Sequence[Cost], units: Sequence[str], copies: int
) -> tuple[tuple[Op, ...], tuple[Cost, ...]]:
    """The operations of a step with more blocks, as far as a simulation reads them, and their costs."""
    launched = {op.writes[0]: at for at, op in enumerate(timeline.ops) if op.launches}
    links = [launched[op.reads[0]] if op.waits else at for at, op in enumerate(timeline.ops)]
    ops: list[Op] = []
    found: list[Cost] = []
    base = 0
    for phase, marks in _phases(timeline, units):
        for at in phase:  # backward may wait again for a collective of forward, which has ended
            links[at] = links[at] if links[at] in phase else at
        signs = [(timeline.ops[at].kind, costs[at], at - links[at]) for at in phase]
        order, stretch = longer(signs, marks, copies)
        if stretch is not None:
            _require_balance([timeline.ops[at] for at in phase[stretch.start : stretch.end]])
        for at, source in enumerate(order):
            op, link = timeline.ops[phase[source]], links[phase[source]] - phase.start
            if op.kind is Kind.FREE:
                continue
            if op.launches or op.waits:
                handle = (f"handle {base + linked(at, source, link, stretch, copies)}",)
                op = replace(op, reads=handle * op.waits, writes=handle * op.launches)
            ops.append(op)
            found.append(costs[phase[source]])
        base += len(order)
    return tuple(ops), tuple(found)


def _total(timeline: Timeline, seconds: Sequence[float], units: Sequence[str], copies: int) -> float:
    """The sum of what each operation takes, in a step with more blocks."""
    total = 0.0
    for phase, marks in _phases(timeline, units):
        order, _ = longer([(timeline.ops[at].kind, seconds[at]) for at in phase], marks, copies)
        total += sum(seconds[phase[source]] for source in order)
    return total


def _require_balance(period: Sequence[Op]) -> None:
    """A period must wait for as many launches as it starts: otherwise they pile up, to be waited for after the last."""
    started = sum(op.kind in LAUNCHES for op in period)
    if started != sum(op.kind is Kind.WAIT for op in period):
        raise NotPeriodic


STEPPED = (*AT_REST, Holds.REDUCED_GRADIENT)  # what the optimizer's step holds of each block


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one rank in a step, in bytes of tensors' storages.

    Attributes:
        at_rest: between two steps, without gradients.
        peak: the most in forward, the loss and backward.
        optimizer_step: the most in the optimizer's step.
        phase: where the peak is.
        by_kind: what is alive at the end of the line that has the peak, the most first.
        storages: at most alive at once.
    """

    at_rest: int
    peak: int
    optimizer_step: int
    phase: str
    by_kind: Mapping[str, int]
    storages: int


@dataclass(frozen=True, slots=True)
class _Change:
    """What one line does to the bytes alive: its most above those before, and those left by kind."""

    rise: int
    total: int
    kinds: tuple[tuple[Holds, int], ...]
    count: int


def held_whole(memory: Memory, traces: Traces, units: Sequence[str], copies: int) -> Held:
    """The memory of a step with ``copies`` more of these alike blocks than were traced, from a forecast with the
    optimizer; raises NotPeriodic if they do not repeat."""
    changes = _changes(memory)
    order = _order(memory, traces, units, changes, copies)
    of_block = [one for one in memory.storages if copies and one.name.startswith(f"{units[0]}.")]
    resting = [one for one in of_block if one.line < 0]
    alive = _before(memory)
    alive.update({kind: copies * sum(one.nbytes for one in resting if one.kind is kind) for kind in AT_REST})
    count = sum(one.line < 0 for one in memory.storages) + copies * len(resting)
    total = sum(alive.values())
    most = count
    peak = at = 0
    for number, position in enumerate(order):
        change = changes[position]
        if total + change.rise > peak:
            peak, at = total + change.rise, number
        total += change.total
        count += change.count
        most = max(most, count)
    for position, times in Counter(order[: at + 1]).items():
        alive.update({kind: times * nbytes for kind, nbytes in changes[position].kinds})
    by_kind = {str(kind): nbytes for kind, nbytes in alive.most_common() if nbytes}
    return Held(
        at_rest=memory.at_rest + copies * sum(one.nbytes for one in resting if one.kind in AT_REST),
        peak=peak,
        optimizer_step=(memory.optimizer_step or 0) + copies * sum(o.nbytes for o in of_block if o.kind in STEPPED),
        phase=memory.lines[order[at]].phase,
        by_kind=by_kind,
        storages=most,
    )


def _before(memory: Memory) -> Counter[Holds]:
    """Bytes by kind that are there before the step."""
    alive = Counter[Holds]()
    for one in memory.storages:
        if one.line < 0:
            alive[one.kind] += one.nbytes
    return alive


def _order(memory: Memory, traces: Traces, units: Sequence[str], changes: Sequence[_Change], copies: int) -> list[int]:
    """The lines of the longer step, by their positions in the forecast."""
    forward, backward = _marks_of(traces.timeline, units)
    found: list[int] = []
    for phase, marks in (("forward", forward), ("loss", []), ("backward", backward)):
        lines = [at for at, line in enumerate(memory.lines) if line.phase == phase]
        by_position = {memory.lines[at].position: number for number, at in enumerate(lines)}
        in_phase = [by_position[traces.timeline.ops[at].source[0]] for at in marks]
        order, _ = longer([changes[at] for at in lines], in_phase, copies if marks else 0)
        found += [lines[at] for at in order]
    return found


def _changes(memory: Memory) -> list[_Change]:
    """What each line of a forecast does."""
    born, freed = Counter[int](), Counter[int]()
    for one in memory.storages:
        if one.line >= 0:
            born[one.line] += 1
        if one.freed is not None:
            freed[one.freed] += 1
    alive: dict[Holds, int] = _before(memory)
    total = sum(alive.values())
    found = []
    for at, line in enumerate(memory.lines):
        now = dict(line.alive.items_in_order)
        kinds = ((kind, now.get(kind, 0) - alive.get(kind, 0)) for kind in Holds)
        highest, after = line.highest - memory.reserve, line.total - memory.reserve
        changed = tuple((kind, nbytes) for kind, nbytes in kinds if nbytes)
        found.append(_Change(highest - total, after - total, changed, born[at] - freed[at]))
        alive, total = now, after
    return found

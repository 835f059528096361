"""The memory of a step of the whole model, from the forecast of a model with fewer blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder_zero.compiled import Traces
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.kinds import Holds
from thunder_zero.tools.planner.repeat import positions
from thunder_zero.tools.planner.step import marks_of, stretch_required

AT_REST = (Holds.PARAMETER, Holds.BUFFER, Holds.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of one rank in a step, in bytes of tensors' storages.

    Attributes:
        at_rest: between two steps, without gradients.
        peak: the most in forward, the loss and backward.
        optimizer_step: the most in the optimizer's step.
        half: where the peak is.
        by_kind: what is alive at the end of the line that has the peak, the most first.
        storages: at most alive at once.
    """

    at_rest: int
    peak: int
    optimizer_step: int
    half: str
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
    """The memory of a step with ``copies`` more of the blocks than were traced.

    Args:
        memory: the forecast of the traces, with the optimizer.
        traces: of a model with fewer blocks.
        units: paths of the blocks that are alike and were traced.
        copies: how many more there are.

    Raises:
        NotPeriodic: the traced blocks do not repeat.
    """
    changes = _changes(memory)
    order = _order(memory, traces, units, changes, copies)
    alive, count = _before(memory, units, copies)
    rest = sum(alive[kind] for kind in AT_REST)
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
    return Held(rest, peak, _stepping(memory, units, copies), memory.lines[order[at]].half, by_kind, most)


def _before(memory: Memory, units: Sequence[str], copies: int) -> tuple[Counter[Holds], int]:
    """Bytes by kind that are there before the step, and the number of storages."""
    alive, count = Counter[Holds](), 0
    for one in memory.storages:
        if one.line < 0:
            times = 1 + copies * (bool(copies) and _is_of(one.name, units[0]))
            alive[one.kind] += times * one.nbytes
            count += times
    return alive, count


def _stepping(memory: Memory, units: Sequence[str], copies: int) -> int:
    """The most in the optimizer's step: each block adds what rests of it, and its gradients."""
    kinds = (*AT_REST, Holds.REDUCED_GRADIENT)
    of_one = [one.nbytes for one in memory.storages if copies and one.kind in kinds and _is_of(one.name, units[0])]
    return (memory.optimizer_step or 0) + copies * sum(of_one)


def _is_of(name: str, unit: str) -> bool:
    return name.startswith(f"{unit}.")


def _order(memory: Memory, traces: Traces, units: Sequence[str], changes: Sequence[_Change], copies: int) -> list[int]:
    """The lines of the longer step, by their positions in the forecast."""
    marks = marks_of(traces.timeline, units)
    ops = traces.timeline.ops
    order: list[int] = []
    for half, found in (("forward", marks.forward), ("loss", ()), ("backward", marks.backward)):
        lines = [at for at, line in enumerate(memory.lines) if line.half == half]
        by_position = {memory.lines[at].position: number for number, at in enumerate(lines)}
        at_marks = [by_position[ops[at].source[0]] for at in found]
        again = copies if found else 0
        stretch = stretch_required([changes[at] for at in lines], at_marks, again)
        order += [lines[at] for at in positions(len(lines), stretch, again)]
    return order


def _changes(memory: Memory) -> list[_Change]:
    """What each line of a forecast does."""
    born, freed = Counter[int](), Counter[int]()
    for one in memory.storages:
        if one.line >= 0:
            born[one.line] += 1
        if one.freed is not None:
            freed[one.freed] += 1
    alive = Counter[Holds]()
    for one in memory.storages:
        if one.line < 0:
            alive[one.kind] += one.nbytes
    total = sum(alive.values())
    found = []
    for at, line in enumerate(memory.lines):
        kinds = tuple((kind, line.alive.get(kind, 0) - alive[kind]) for kind in Holds)
        highest, after = line.highest - memory.reserve, line.total - memory.reserve
        changed = tuple((kind, nbytes) for kind, nbytes in kinds if nbytes)
        found.append(_Change(highest - total, after - total, changed, born[at] - freed[at]))
        alive, total = Counter(dict(line.alive)), after
    return found

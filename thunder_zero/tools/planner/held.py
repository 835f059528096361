"""Scales the forecast of memory of a model with fewer blocks to the whole model.

Each block more adds what rests of it to every figure, and its lines to the step: what each line does to memory, the
forecast says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thunder_zero.compiled import Traces
from thunder_zero.tools.forecast.figures import Memory
from thunder_zero.tools.forecast.kinds import Holds
from thunder_zero.tools.forecast.memory import AT_REST
from thunder_zero.tools.planner.repeat import positions
from thunder_zero.tools.planner.step import marks_of, stretch_required

STEPPED = (*AT_REST, Holds.REDUCED_GRADIENT)  # what the optimizer's step holds of each block


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
        half=memory.lines[order[at]].half,
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

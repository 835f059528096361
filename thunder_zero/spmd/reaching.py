"""Which lines of a record reach a gradient, and which gathers leave gradients out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thunder_zero.spmd.lines import RecordedLine, Shadow, StepRecord
from thunder_zero.spmd.rules import FACTORS, MOVES

GATHERS = ("allgather_", "_allgather_base_", "allgather_into_tensor_coalesced_")  # DTensor, which has others, is right
READS = ("_local_scalar_dense", "item")  # give Python a number


def lines_that_matter(record: StepRecord, neighbour: Mapping[int, Shadow]) -> set[int]:
    """Return the lines from which gradients or parameters follow. Others make metrics, such as an accuracy.

    The number that Python read last matters to a line that has other fractions on the neighbour.
    """
    needed, due = {item.ref.storage for item in record.parameters}, record.gradients_by_line
    result: set[int] = set()
    takes_number = False
    for index, line in reversed([*enumerate(record.lines)]):
        needed |= {item.ref.storage for item in due.get(index + 1, ())}
        is_read = takes_number and line.name in READS
        if is_read or any(ref.storage in needed for ref in (*line.written, *line.results)):
            result.add(index)
            needed |= {ref.storage for ref in line.inputs}
            mine = record.shadows[index]
            takes_number = not is_read and (takes_number or _fractions(mine) != _fractions(neighbour.get(index, mine)))
    return result


def averaged_parameters(record: StepRecord, axis: str) -> set[int]:
    """Return the first storages of parameters that are summed over an axis after an update, or whose changes are.

    Their ranks train models of their own, and average them, as local SGD does.
    """
    held = {item.first for item in record.parameters if not isinstance(item.placements.get(axis), int)}
    result = set[int]()
    origins: dict[int, set[int]] = {}  # the parameters of which a storage has copies or differences
    for line in record.lines:
        item, inputs = line.collective, [origins.get(ref.storage, set()) for ref in line.inputs]
        if item is not None:
            result.update(*inputs if axis in item.axes and item.op in ("sum", "avg") else ())
        elif not line.backward:
            is_difference = "sub" in line.name or line.name in MOVES
            copied = set().union(*(inputs if is_difference else inputs[:1] if line.name in FACTORS else ()))
            origins |= {ref.storage: copied for ref in line.results if ref.storage not in held}
            origins |= {ref.storage: copied | (held & {ref.storage}) for ref in line.written}
    return result


def undone_updates(record: StepRecord) -> tuple[set[int], set[tuple[int, int]]]:
    """Find updates of parameters that are undone later, as those of SAM, by the numbers that the parameters have.

    Return the lines that make them from gradients, and where storages have their old numbers again: lines and storages.
    """
    held = {item.first for item in record.parameters}
    by_write = {(ref.storage, ref.writes): index for index, line in enumerate(record.lines) for ref in line.written}
    lines, undone, is_moved = set[int](), set[tuple[int, int]](), False
    for item in record.parameters:
        storages = (item.first, item.ref.storage)  # a step may put an old copy in place of a parameter
        layout = item.ref.shape, item.ref.stride
        refs = [ref for ref in record.values if ref.storage in storages and (ref.shape, ref.stride) == layout]
        refs = sorted(refs, key=lambda ref: (storages.index(ref.storage), ref.writes))
        for before, ref, *later in (refs[index:] for index in range(len(refs) - 2)):
            start, moved = record.values[before].double(), record.values[ref] - record.values[before]
            rest = (other for other in later if (record.values[other] - start).norm() <= 0.1 * moved.norm())
            again, write = next(rest, None), by_write.get((ref.storage, ref.writes))
            if again is not None and write is not None:
                is_moved |= bool(moved.any())
                lines.add(write)
                undone |= {(number, item.first) for number in [by_write.get((item.first, again.writes))] if number}
    if not is_moved:  # a learning rate of zero
        return set(), set()
    sources = {ref.storage for index in lines for ref in record.lines[index].inputs} - held
    takes_number = False
    for index in reversed(range(max(lines, default=-1) + 1)):
        line = record.lines[index]
        is_needed = any(ref.storage in sources for ref in (*line.written, *line.results))
        is_read = takes_number and line.name in READS
        if is_read or (is_needed and not (line.backward or line.tracked)):
            lines.add(index)
            sources |= {ref.storage for ref in line.inputs} - held
        takes_number = not is_read and (takes_number or (index in lines and bool(_fractions(record.shadows[index]))))
    return lines, undone


def _fractions(line: Shadow) -> list[float]:
    return [item for item in line.scalars if isinstance(item, float)]


def gathers_without_gradient(record: StepRecord) -> Iterator[tuple[int, RecordedLine]]:
    """Yield gathers of values with a gradient whose results have none, each with the index of a line that reads it.

    Inside of an autograd function results have none yet: the first line outside decides.
    """
    tracked: set[int] = set()  # storages with gradients
    gathered: dict[int, RecordedLine] = {}  # by storage
    for index, line in enumerate(record.lines):
        if line.backward:
            continue
        tracked |= line.tracked
        origin = next((gathered[ref.storage] for ref in line.inputs if ref.storage in gathered), None)
        if line.name in GATHERS:
            has_gradient = any(ref.storage in tracked for inputs, _ in line.pairs for ref in inputs)
            outputs = {ref.storage for _, group in line.pairs for ref in group if has_gradient}
            gathered.update(dict.fromkeys(outputs, line))
        elif origin is not None and line.differentiates:
            if line.tracked.isdisjoint(gathered):
                yield index, origin
            gathered = {storage: item for storage, item in gathered.items() if item is not origin}
        elif origin is not None:
            gathered.update((ref.storage, origin) for ref in line.results)

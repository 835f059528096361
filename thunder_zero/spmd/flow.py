"""Walks a record along one axis of the mesh, and types each value that its lines write.

The type of an output follows from the operator itself (``rules.py``). Where the neighbouring rank ran the same line
with other numbers or on another part of a tensor, the value differs between the ranks. A value also has a factor, by
which it differs from the true one, and the cause of its fault: what follows from a fault is not told again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from math import isclose
from typing import Any

import torch

from thunder_zero.plan.amounts import name_of
from thunder_zero.spmd.admitted import Admitted
from thunder_zero.spmd.factors import Factors
from thunder_zero.spmd.laws import Outcome, P, R, V, filled, has, letters
from thunder_zero.spmd.lines import SILENT, RecordedLine, Ref, Shadow, StepRecord
from thunder_zero.spmd.own_batch import is_of_batch, known_numbers, of_own_batch, scatters_equal
from thunder_zero.spmd.parts import Parts
from thunder_zero.spmd.reaching import READS, averaged_parameters, undone_updates
from thunder_zero.spmd.regions import Region, Trial, are_typed, gathered, joined, starts_region
from thunder_zero.spmd.rules import FACTORS, MOVES, SELECTIONS, SUMS, Rules, averages, is_constant, runner, shapes_of
from thunder_zero.spmd.rules import Memo as Memo
from thunder_zero.spmd.sendings import Sendings
from thunder_zero.spmd.storages import TypedStorage, TypedStorages
from thunder_zero.spmd.told import Ending, Told
from thunder_zero.spmd.verdict import Fault as Fault

TRADES = ("recv_", "recv_any_source_")
UNTYPED_TRADE = "what send and recv bring is not typed", "unknown"


@dataclass(frozen=True)
class AxisTypes:
    """The types of a record on one axis.

    Attributes:
        lines: the types of what each line writes.
        faults: what is wrong.
        gradients: of each parameter, the type and the factor by which it differs from the true gradient.
        assumed: what the types assume.
        inputs_differ: whether the ranks read different values.
        reductions: those of each parameter's gradient.
    """

    lines: tuple[tuple[str, ...], ...]
    faults: tuple[Fault, ...]
    gradients: Mapping[str, tuple[str, float]]
    assumed: tuple[str, ...]
    inputs_differ: bool
    reductions: Mapping[str, tuple[str, ...]]


class Walk:
    """Types the values of a record on one axis.

    Args:
        record: the step on this rank.
        axis: the axis of the mesh.
        neighbour: the step on the next rank of the axis, if it ran.
        whole: the step on a mesh with one rank on this axis, if it ran.
        batches_differ: whether ranks of the axis are meant to have batches of their own.
        memo: outcomes of earlier walks.
    """

    def __init__(
        self,
        record: StepRecord,
        axis: str,
        neighbour: StepRecord | None,
        whole: StepRecord | None,
        *,
        batches_differ: bool,
        memo: Memo,
    ) -> None:
        self._record, self._axis, self._size = record, axis, record.axes[axis]
        self._batches_differ = batches_differ
        self._neighbour, self._whole = _aligned(record, neighbour), _aligned(record, whole)
        self._alone = record.stepped ^ (neighbour or record).stepped if batches_differ else frozenset()
        self._values = TypedStorages()
        self._parts = Parts(self._values)
        self._rules = Rules(
            record.values, self._parts.codes, self._values, self._size, batches_differ=batches_differ, memo=memo
        )
        self._told, self._factors = Told(axis), Factors(record, axis, self._values, self._parts.codes)
        self._sized_by_data: set[int] = set()  # storages whose shapes follow from the values of each rank
        self._admitted = Admitted(
            record, axis, self._neighbour, whole, self._whole, self._values, self._told, batches_differ=batches_differ
        )
        self._averaged = averaged_parameters(record, axis)
        self._values.own(self._averaged)
        self._undoing, self._undone = undone_updates(record) if batches_differ else (set(), set())
        self._ending = Ending(record, axis, self._values, self._told, self._averaged)
        self._sendings = Sendings(record, axis, self._values, self._parts, batches_differ, bool(self._averaged))
        self._line, self._began_backward = 0, False
        self._numbers: tuple[Any, ...] | None = None  # those of the line on the neighbour, if they differ
        self._read = {ref.storage for line in record.lines for ref in line.inputs}
        self._gradients: set[int] = set()  # storages of values that follow from the start of a backward
        self._has_equal_number = False  # whether the last number that Python read, and that differs, is typed R

    def run(self) -> AxisTypes:
        """Type all lines and check the gradients."""
        types, due, ending, alone = [], self._record.gradients_by_line, self._ending, self._alone
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index, line in enumerate((*self._record.lines, None)):
                self._line = self._told.line = index
                if any(grad.path in self._record.stepped for grad in due.get(index, ())):
                    ending.step_alone(alone)
                    alone = frozenset()
                for grad in due.get(index, ()):
                    ending.gradient(grad, is_summed=grad.ref.storage in self._sendings.summed)
                if line is not None:
                    types.append(self._type(line))
        if not self._batches_differ:
            ending.loss()
        ending.parameters(self._admitted.cut)
        faults, assumed, differ = tuple(ending.faults(self._neighbour)), self._told.assumed, self._admitted.differ
        return AxisTypes(tuple(types), faults, ending.gradients, assumed, differ, ending.reductions)

    def _type(self, line: RecordedLine) -> tuple[str, ...]:
        """Type what a line writes, and return the types as text."""
        self._mine = self._record.shadows[self._line]
        self._theirs = self._neighbour.get(self._line, self._mine)  # the line as the neighbour ran it
        self._began_backward |= line.backward
        if line.name in READS and self._mine.numbers != self._theirs.numbers:
            self._has_equal_number = not self._parts.codes(line.inputs[0]).any()
        targets = (*line.written, *line.results)
        is_sized = self._batches_differ or line.name in SELECTIONS or self._reads_sized(line)
        if is_sized and shapes_of(self._mine) != shapes_of(self._theirs):
            self._sized_by_data |= {ref.storage for ref in targets}
        is_unlike = _are_unlike(self._mine.scalars, self._theirs.scalars, has_equal_number=self._has_equal_number)
        self._numbers = self._theirs.scalars if is_unlike and not self._reads_sized(line) else None
        self._parts.over = self._parts.of_rank(line, self._theirs, self._sized_by_data)
        self._admitted.read(line, self._line)
        self._admitted.differ |= line.name.startswith("rand") and self._theirs.drawn != self._mine.drawn
        if line.collective is not None:
            self._collective(line)
        elif line.name in TRADES:
            self._write(line, (), line.inputs, [Outcome(filled(ref.shape, V), *UNTYPED_TRADE) for ref in line.inputs])
        elif line.is_view:
            self._parts.view(line, self._mine, self._theirs, is_sized=self._reads_sized(line))
            self._join(line)
        elif line.name not in SILENT and line.operator.namespace != "c10d" and targets:
            self._compute(line, targets)
        self._parts.over = {}
        return tuple(letters(self._parts.codes(item)) for item in targets)

    def _reads_sized(self, line: RecordedLine) -> bool:
        return any(ref.storage in self._sized_by_data for ref in line.inputs)

    def _compute(self, line: RecordedLine, targets: Sequence[Ref]) -> None:
        """Type what a line writes, if need be together with the lines before it."""
        is_own = self._line in self._undoing or any(self._values[ref].is_own for ref in line.read)
        if is_own and not is_constant(line.name):
            alike = self._numbers is None and not any(self._parts.codes(ref).any() for ref in line.read)
            self._write(line, line.read, targets, [Outcome(filled(ref.shape, R if alike else V)) for ref in targets])
            return
        may_start = self._numbers is None and not any(has(self._parts.codes(ref), V) for ref in line.inputs)
        region = self._join(line)
        indices = (ref for ref in line.inputs if not ref.dtype.is_floating_point and self._values[ref].region)
        is_routed = any(has(self._parts.codes(ref), V) for ref in indices)
        shadows = self._mine, self._theirs
        outcomes = self._rules.outcomes(line, targets, *shadows, self._numbers, is_routed=is_routed)
        joint = self._rules.joint_outcomes(region, targets) if region and not are_typed(outcomes, targets) else None
        sources, codes = [self._values[ref] for ref in line.inputs], [*map(self._parts.codes, line.inputs)]
        outcomes = known_numbers(line, outcomes, sources, self._mine, self._neighbour.get(self._line))
        is_of_data = self._batches_differ and is_of_batch(line, sources, began_backward=self._began_backward)
        is_scattered = joint is None and is_of_data and scatters_equal(line, codes)
        if joint is None and is_of_data:
            outcomes = [*of_own_batch(line, outcomes, targets, codes, sources, *shadows, self._gradients)]
        if may_start and not region and starts_region(line.name, outcomes, targets, self._read):
            region = joined((), self._trial(line))
            text = f"what {line.name} writes depends on the data, and no law was found after it"
            outcomes = [replace(item, text=text, kind="unknown") if has(item.codes, V) else item for item in outcomes]
        reads = () if is_constant(line.name) else line.read
        self._write(line, reads, targets, joint or outcomes, ends_region=joint is not None or is_scattered)
        for ref, outcome in zip(targets, joint or outcomes, strict=True):
            self._values[ref].region = region if has(outcome.codes, V) or has(outcome.codes, P) else ()

    def _join(self, line: RecordedLine) -> Region:
        """Return the region of a line; () if no input has one. A view joins that of its source."""
        regions = [self._values[ref].region for ref in line.inputs]
        region = joined(regions, self._trial(line)) if any(regions) and not self._parts.over else ()
        if line.is_view:
            self._values[line.inputs[0]].region = region
        return region

    def _trial(self, line: RecordedLine) -> Trial:
        codes = (None if self._values[ref].region else self._parts.codes(ref).clone() for ref in line.inputs)
        return Trial(self._line, line, runner(line, self._numbers, in_place=True), tuple(codes))

    def _collective(self, line: RecordedLine) -> None:
        item = line.collective
        assert item is not None
        for inputs, outputs, outcomes in self._sendings.of(item, line.pairs):
            read = () if item.op in ("max", "min") else inputs  # they are equal on all ranks, whatever they read
            self._told.unknown(self._values[ref].cause for ref in read)
            self._write(line, read, outputs, outcomes)
            is_gathered = self._axis in item.axes and item.kind == "all_gather" and has(outcomes[0].codes, V)
            for ref in outputs:
                self._values[ref].region = (gathered(self._line, line, outputs),) if is_gathered else ()
        if not item.axes:
            self._told.say("error", f"{item.kind} over a group that is no axis of the mesh", line.where)

    def _write(
        self,
        line: RecordedLine,
        inputs: Sequence[Ref],
        targets: Sequence[Ref],
        outcomes: Sequence[Outcome],
        *,
        ends_region: bool = False,
    ) -> None:
        """Keep what is known of each target, and tell the faults of the outcomes."""
        sources = [self._values[ref] for ref in inputs]
        begins = line.name == "ones_like" and not targets[0].shape  # a backward: all gradients follow from the loss
        if begins or (line.backward and self._gradients.intersection(ref.storage for ref in line.inputs)):
            self._gradients.update(ref.storage for ref in targets)
        is_typed = ends_region and not any(has(item.codes, V) for item in outcomes)
        cause = _cause([*(self._values[ref] for ref in line.inputs if begins), *sources], is_typed=is_typed)
        note = next((item.cause for item in sources if item.cause is not None and not item.is_spoiled), None)
        follows_size = self._whole.get(self._line, self._mine).scalars != self._mine.scalars
        counts = self._began_backward and (self._batches_differ or self._factors.loss_is_mean() or follows_size)
        factor_of = partial(self._factors.of, line, inputs, counts=counts)
        divides = self._batches_differ and counts and self._factors.own_part(line) < 1
        factors = [factor_of(ref, outcome) for ref, outcome in zip(targets, outcomes, strict=True)]
        reductions = _reductions(line, [item.reductions for item in sources], targets)
        kind = "" if line.collective is None else line.collective.kind
        is_sent = line.collective is not None and self._axis in line.collective.axes
        is_logged = line.tracked.issuperset(ref.storage for ref in targets)  # its gradient does not follow from the sum
        is_mean = (not kind or is_logged) and any(item.is_mean for item in sources)
        moves = line.name in MOVES or line.name in FACTORS
        parts = frozenset().union(*({ref.storage} | item.parts for ref, item in zip(inputs, sources, strict=True)))
        is_moved = line.name in MOVES and any(item.is_divided for item in sources[:1])
        is_divided = is_moved or self._factors.divides(line)
        for ref, outcome, factor in zip(targets, outcomes, factors, strict=True):
            value = self._values[ref]
            if divides and not reductions and isclose(factor * self._size, 1.0) and not outcome.codes.any():
                outcome, factor = replace(outcome, codes=filled(ref.shape, P)), 1.0  # its sum over the ranks is true
            self._values.give(ref, self._admitted.known(line, ref, outcome.codes))
            self._values.set_factor(ref, factor)
            is_share = has(outcome.codes, P) and not self._began_backward and (self._batches_differ or not ref.shape)
            averages_here = averages(line) and has(outcome.codes, P)
            value.is_mean = is_mean or averages_here or (is_share and self._factors.divides_by_own_count(line))
            if ref in line.written:
                self._values.spread(ref)
            value.inherit(sources, sums="reduce" in kind, is_sent=is_sent, is_gradient=line.backward)
            value.is_own |= ref.storage in self._averaged or (self._line in self._undoing and has(outcome.codes, V))
            value.is_divided, value.reductions, value.parts = is_divided, reductions, parts if moves else frozenset()
            told = self._told.hear(outcome, line, note) if cause is None else None
            value.cause = cause or told or (note if has(outcome.codes, V) else None)
            if (self._line, ref.storage) in self._undone:
                self._values.restore(ref)


def _are_unlike(mine: Sequence[Any], theirs: Sequence[Any], *, has_equal_number: bool) -> bool:
    """Return whether numbers differ, and do not follow from a number that Python read and all ranks have."""
    unlike = [x for x, y in zip(mine, theirs, strict=False) if x != y]
    return theirs != mine and not (has_equal_number and all(isinstance(item, float) for item in unlike))


def _cause(origins: Iterable[TypedStorage], *, is_typed: bool) -> Fault | None:
    """Return the first fault that values follow from. What is typed does not follow from an unknown type."""
    causes = (item.cause for item in origins if item.is_spoiled)
    return next((item for item in causes if not (is_typed and item and item.kind == "unknown")), None)


def _reductions(line: RecordedLine, before: Sequence[tuple[str, ...]], targets: Sequence[Ref]) -> tuple[str, ...]:
    """Return the reductions of what a line writes: a gradient keeps those that made it until it is used."""
    item, keeps = line.collective, line.name in MOVES | FACTORS | SUMS
    result = tuple(dict.fromkeys(text for texts in before for text in texts)) if item is not None or keeps else ()
    if item is not None and item.op in ("sum", "avg"):
        return (*result, f"{item} in {name_of(targets[0].dtype)}")
    return result


def _aligned(record: StepRecord, other: StepRecord | None) -> dict[int, Shadow]:
    """Return the other rank's line for each line, as far as the ranks run the same operators."""
    shadows = other.shadows if other is not None else ()
    names, others = [item.name for item in record.shadows], [item.name for item in shadows]
    if names == others:
        return dict(enumerate(shadows))
    blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
    return {block.a + index: shadows[block.b + index] for block in blocks for index in range(block.size)}

"""Walks a record along one axis of the mesh, and types each value that its lines write.

The type of an output follows from the operator itself: it runs again on two imagined ranks (``laws.py``). Operators
that only move elements move their codes. Where the neighbouring rank ran the same line with other numbers or on another
part of a tensor, the value differs between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import combinations
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_zero.plan.amounts import summed_up
from thunder_zero.spmd.collectives import effect
from thunder_zero.spmd.laws import Experiment, Outcome, P, R, V, X, filled, halves, has, letters
from thunder_zero.spmd.operators import (
    COPIES,
    FACTORS,
    LOOKUPS,
    MEANS,
    MOVES,
    PARTS_OF_BACKWARD,
    SCATTERS,
    SELECTIONS,
    averages,
    is_constant,
    key_of,
    runner,
)
from thunder_zero.spmd.record import RANDOM, SILENT, Parameter, RecordedLine, Ref, Shadow, StepRecord
from thunder_zero.spmd.storages import TypedStorages, cut_dim, end_of, is_contiguous

Memo = dict[bytes, list[Outcome] | str]  # outcomes of experiments, or why they failed; equal lines are typed once
MEANINGS = {
    "R": "equal on all ranks",
    "S": "a slice",
    "P": "a share of a sum that is never summed",
    "N": "a share of a norm",
    "V": "different on each rank",
    "X": "random on each rank",
}


@dataclass(frozen=True, repr=False)
class Fault:
    """What is wrong, or cannot be said: ``kind`` is ``"error"``, ``"warning"`` or ``"unknown"``."""

    axis: str
    kind: str
    text: str
    where: str = ""
    line: int = 0
    parameters: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return summed_up(self, f"{self.kind} on {self.axis}: {self.text}")


@dataclass(frozen=True)
class AxisTypes:
    """The types of a record on one axis.

    Attributes:
        lines: the types of what each line writes.
        faults: what is wrong.
        gradients: of each parameter, the type and the factor by which it differs from the true gradient.
        assumed: what the types assume.
        inputs_differ: whether the ranks read different values.
    """

    lines: tuple[tuple[str, ...], ...]
    faults: tuple[Fault, ...]
    gradients: Mapping[str, tuple[str, float]]
    assumed: tuple[str, ...]
    inputs_differ: bool


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
        self._batches_differ, self._memo = batches_differ, memo
        self._neighbour, self._whole = _aligned(record, neighbour), _aligned(record, whole)
        self._full_shapes = {item.path: item.ref.shape for item in whole.parameters} if whole is not None else {}
        self._values = TypedStorages()
        self._over: dict[Ref, Tensor] = {}  # codes of inputs that are another part of a value on the neighbour
        self._gathered: dict[int, Tensor] = {}  # codes of parameters that FSDP2 gathers, by storage
        self._faults: dict[tuple[str, str], Fault] = {}
        self._assumed: set[str] = set()
        self._inputs_differ = False
        self._placed = {item.ref.storage: item for item in (*record.buffers, *record.parameters)}
        self._line = 0
        lines = enumerate(record.lines)
        self._first_backward = next((index for index, line in lines if line.backward), len(record.lines))

    def run(self) -> AxisTypes:
        """Type all lines and check the gradients."""
        gradients: dict[str, tuple[str, float]] = {}
        types = []
        self._place()
        due = self._record.gradients_by_line
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index, line in enumerate((*self._record.lines, None)):
                self._line = index
                for grad in due.get(index, ()):
                    gradients[grad.path] = self._check_gradient(grad)
                if line is not None:
                    types.append(self._type(line))
        self._check_loss()
        faults, assumed = tuple(self._faults.values()), tuple(sorted(self._assumed))
        return AxisTypes(tuple(types), faults, gradients, assumed, self._inputs_differ)

    def _codes(self, ref: Ref) -> Tensor:
        return self._over[ref] if ref in self._over else self._values.codes(ref)

    @property
    def _mine(self) -> Shadow:
        return self._record.shadows[self._line]

    @property
    def _theirs(self) -> Shadow:
        """The line as the neighbour ran it."""
        return self._neighbour.get(self._line, self._mine)

    @property
    def _numbers(self) -> tuple[Any, ...] | None:
        """The numbers among the neighbour's arguments, or None if the ranks run the same line."""
        return self._theirs.scalars if self._theirs.scalars != self._mine.scalars else None

    # inputs

    def _place(self) -> None:
        """Type parameters and buffers by their placements."""
        for item in self._placed.values():
            where = item.placements.get(self._axis)
            if isinstance(where, int):
                self._values.give(item.ref, halves(item.ref.shape, where))
            elif where == "partial":
                self._values.give(item.ref, P)
        for ref, placements in self._record.slices:
            where = placements.get(self._axis)
            if isinstance(where, int):
                self._values.give(ref, halves(ref.shape, where))
                self._gathered[ref.storage] = self._values[ref].codes.clone()

    def _admit(self, line: RecordedLine) -> None:
        """Type values that come from outside of the record, by comparing them with the neighbour's."""
        mine, theirs, whole = self._mine.fresh, self._theirs.fresh, self._whole.get(self._line, self._mine).fresh
        theirs, whole = (item if len(item) == len(mine) else mine for item in (theirs, whole))
        for ref, value, their_value, (full, _) in zip(line.fresh, mine, theirs, whole, strict=True):
            item, differs = self._placed.get(ref.storage), value != their_value
            if ref.storage in self._record.equalised:
                continue
            if item is not None:
                self._admit_parameter(item, self._full_shapes.get(item.path, full), differs)
                continue
            dim = cut_dim(ref.shape, full)
            self._inputs_differ |= differs
            if differs or (dim is not None and not self._batches_differ):
                self._values.give(ref, halves(ref.shape, 0 if dim is None else dim))

    def _admit_parameter(self, item: Parameter, full: Sequence[int], differs: bool) -> None:
        if self._axis in item.placements:
            return
        if (dim := cut_dim(item.ref.shape, full)) is not None:
            self._values.give(item.ref, halves(item.ref.shape, dim))
        elif differs:
            text = "its values differ between the ranks before the step: broadcast it, or seed the ranks alike"
            self._say("error", text, item.path, item.path)

    # lines

    def _type(self, line: RecordedLine) -> tuple[str, ...]:
        """Type what a line writes, and return the types as text."""
        self._over = self._parts_of_rank(line)
        self._admit(line)
        targets = (*line.written, *line.results)
        if line.collective is not None:
            self._collective(line)
        elif line.is_view:
            self._view(line)
        elif line.name not in SILENT and line.operator.namespace != "c10d" and targets:
            self._compute(line, targets)
        self._over = {}
        return tuple(letters(self._codes(item)) for item in targets)

    def _parts_of_rank(self, line: RecordedLine) -> dict[Ref, Tensor]:
        """Return codes of inputs that are another part of an equal value on the neighbouring rank."""
        result: dict[Ref, Tensor] = {}
        for ref, offset in zip(line.inputs, self._theirs.offsets, strict=False):
            if offset != ref.offset and ref.nbytes and not self._codes(ref).any():
                steps = [*ref.stride, 0]
                gaps = (dim for dim in range(1, len(ref.shape)) if steps[dim - 1] > ref.shape[dim] * steps[dim])
                result[ref] = halves(ref.shape, next(gaps, 0))
        return result

    def _view(self, line: RecordedLine) -> None:
        """Pass codes on to a view; a view of another part on each rank is a slice of its own."""
        source, mine, theirs = line.inputs[0], self._mine, self._theirs
        for ref in line.results:
            if len(line.results) > 1:
                self._values.follow(source, ref)
            elif self._over:
                args, kwargs = tree_map_only(Ref, lambda item: self._codes(item).clone(), (line.args, line.kwargs))
                self._values.separate(ref, line.operator(*args, **kwargs).clone())
            elif theirs.outputs != mine.outputs and (theirs.scalars != mine.scalars or theirs.offsets == mine.offsets):
                codes = self._values[source].view(ref).clone()
                codes = codes if codes.any() else halves(ref.shape, cut_dim(ref.shape, source.shape))
                self._values.separate(ref, codes)
            else:
                self._values.follow(source, ref)

    def _collective(self, line: RecordedLine) -> None:
        assert line.collective is not None
        for inputs, outputs in line.pairs:
            if not inputs:
                continue
            codes = [self._codes(item).clone() for item in inputs]
            zero = all(not self._record.values[item].any() for item in inputs if item in self._record.values)
            shapes = [item.shape for item in outputs]
            outcomes = effect(line.collective, self._axis, self._size, codes, shapes, zero=zero)
            factor = self._values.largest_factor(inputs)
            tainted = any(self._values[item].is_tainted for item in inputs)
            self._tell_untyped(inputs)
            if (fault := outcomes[0].fault) and not tainted:
                note = next((note for item in inputs if (note := self._values[item].note)), "")
                self._say("error", f"{fault}: {note}" if note and "no share" in fault else fault, line.where)
                tainted = True
            for ref, outcome in zip(outputs, outcomes, strict=True):
                self._values.give(ref, outcome.codes)
                self._values[ref].set_factor(factor * outcome.factor)
                self._values[ref].is_tainted = tainted
        if not line.collective.axes:
            self._say("error", f"{line.collective.kind} over a group that is no axis of the mesh", line.where)

    # operators

    def _compute(self, line: RecordedLine, targets: Sequence[Ref]) -> None:
        for ref, codes in zip(targets, self._codes_of(line, targets), strict=True):
            gathered = self._gathered.get(ref.storage)
            if gathered is not None and line.name in MOVES and is_contiguous(ref):
                part = gathered[ref.offset : end_of(ref)]
                codes = torch.cat([part, codes.reshape(-1)[len(part) :]])
            self._values.give(ref, codes)
        for ref in targets:
            self._follow(line, ref)

    def _codes_of(self, line: RecordedLine, targets: Sequence[Ref]) -> list[Tensor]:
        """Return the codes of what a line writes."""
        name, numbers = line.name, self._numbers
        codes = [self._codes(item).clone() for item in line.inputs]
        if numbers is not None and self._sizes_differ() and line.backward:
            self._cannot_say(f"the sizes of {name} differ between the ranks", line, targets)
        if name in ("arange", "linspace") and numbers is not None:
            return [halves(ref.shape) for ref in targets]
        if name in RANDOM and (not line.inputs or name.endswith("_") or self._draws_differ()):
            return [self._random(name, codes, ref) for ref in targets]
        if is_constant(name) or (numbers is None and not any(item.any() for item in codes)):
            return [filled(ref.shape, R) for ref in targets]
        if name in MOVES:
            return self._move(line, targets)
        if "batch_norm" in name and self._batches_differ:
            return self._batch_norm(line, codes[0] if not line.backward else codes[1], targets)
        if numbers is None and {letter for item in codes for letter in letters(item).split("+")} <= {"R", "X"}:
            shapes = [item.shape for item in codes if has(item, X)]
            if all(ref.shape in shapes for ref in targets):
                return [filled(ref.shape, X) for ref in targets]
        return self._masked_part(line, codes, targets) or self._experiment(line, codes, targets)

    def _sizes_differ(self) -> bool:
        return [shape for _, shape in self._mine.outputs] != [shape for _, shape in self._theirs.outputs]

    def _draws_differ(self) -> bool:
        """Return whether the ranks draw different random numbers. Ranks with batches of their own may draw alike."""
        return self._batches_differ or self._theirs.drawn != self._mine.drawn

    def _random(self, name: str, codes: Sequence[Tensor], ref: Ref) -> Tensor:
        if not self._draws_differ():
            return filled(ref.shape, R)
        alike = (item for item in codes if item.shape == ref.shape and item.any())
        return next(alike, filled(ref.shape, X)) if name == "native_dropout" else filled(ref.shape, X)

    def _batch_norm(self, line: RecordedLine, codes: Tensor, targets: Sequence[Ref]) -> list[Tensor]:
        """Type a norm over the batch as if its statistics were those of the whole batch, and warn."""
        if not line.backward:
            self._say("warning", f"{line.name}: each rank has the statistics of its own batch", line.where)
        small = P if line.backward else R
        return [codes if ref.shape == codes.shape else filled(ref.shape, small) for ref in targets]

    def _move(self, line: RecordedLine, targets: Sequence[Ref]) -> list[Tensor]:
        """Run an operator that only moves elements on their codes."""
        name = line.name
        if name in COPIES:
            return [self._codes(line.inputs[0]).clone()]
        if name == "copy_":
            return [self._codes(line.inputs[1]).expand(line.inputs[0].shape).clone()]
        if name == "all_gather_copy_in":
            self._values.give(targets[0], torch.cat([self._codes(ref).reshape(-1) for ref in line.args[0]]))
            return [self._codes(ref).clone() for ref in targets]  # the second target contains the first
        args, kwargs = tree_map_only(Ref, lambda ref: self._codes(ref).float(), (line.args, line.kwargs))
        result = line.operator(*(args[:2] if name == "constant_pad_nd" else args), **kwargs)
        result = kwargs.get("out", args[0] if name.startswith("_foreach_copy_") else result)
        return [item.byte() for item in tree_leaves(result) if isinstance(item, Tensor)]

    def _masked_part(self, line: RecordedLine, codes: Sequence[Tensor], targets: Sequence[Ref]) -> list[Tensor] | None:
        """Type a look-up in this rank's part of a table, which a mask makes a share of a sum; None for other lines."""
        name = line.name
        others = [code for code, item in zip(codes, line.inputs, strict=True) if not item.dtype.is_floating_point]
        masks = [code for code, item in zip(codes, line.inputs, strict=True) if item.dtype is torch.bool]
        if name in SELECTIONS and any(item.any() for item in masks):
            self._cannot_say(f"the shape of {name} depends on the data", line, targets)
            return [filled(item.shape, V) for item in targets]
        if self._numbers is None and not any(has(item, V) for item in others):
            return None
        if name in LOOKUPS and len(codes) > 1 and any("S" in letters(item) for item in codes):
            text = f"{name} in a rank's own part of a table is masked where the index belongs to other ranks"
            self._assumed.add(text)
            return [filled(item.shape, P) for item in targets]
        if name in SCATTERS and not targets[0].dtype.is_floating_point:
            return [filled(item.shape, V) for item in targets]
        if name in PARTS_OF_BACKWARD or (name.startswith(("index_put", "masked_fill")) and has(codes[0], P)):
            return [filled(item.shape, P) for item in targets]
        if name in SCATTERS:
            self._assumed.add(f"{name} into a rank's own part of a table leaves out the rows of other ranks")
            return [halves(item.shape, 0 if name.startswith("embedding") else -1) for item in targets]
        return None

    def _experiment(self, line: RecordedLine, codes: list[Tensor], targets: Sequence[Ref]) -> list[Tensor]:
        """Run the line on two imagined ranks, and report what it shows."""
        outcomes = self._outcomes(line, codes, targets)
        if not isinstance(outcomes, str) and any(item.fault for item in outcomes):
            shares = [  # a bias divided by the number of ranks is a share of the bias
                filled(item.shape, P) if self._values[ref].is_divided and not item.any() else item
                for ref, item in zip(line.inputs, codes, strict=True)
            ]
            again = self._outcomes(line, shares, targets)
            outcomes = outcomes if isinstance(again, str) or any(item.fault for item in again) else again
        if isinstance(outcomes, str):
            self._cannot_say(f"{line.name} could not run again: {outcomes}", line, targets)
            return [filled(ref.shape, V) for ref in targets]
        for ref, outcome in zip(targets, outcomes, strict=True):
            self._hear(line, ref, outcome)
        return [outcome.codes for outcome in outcomes]

    def _outcomes(self, line: RecordedLine, codes: list[Tensor], targets: Sequence[Ref]) -> list[Outcome] | str:
        """Return the outcomes of an experiment, or why it failed. Remember those of an equal line."""
        values, numbers = [self._record.values[ref] for ref in line.inputs], self._numbers
        key = key_of(line, codes, values, numbers, self._size)
        if key not in self._memo:
            try:
                run = runner(line, numbers)
                experiment = Experiment(line.name, self._size, run, values, codes, ranked=numbers is not None)
                self._memo[key] = experiment.outcomes([ref.shape for ref in targets])
            except Exception as error:
                self._memo[key] = f"{type(error).__name__}: {str(error)[:80]}"
        return self._memo[key]

    def _hear(self, line: RecordedLine, ref: Ref, outcome: Outcome) -> None:
        """Report the fault of an outcome, unless it follows from an earlier fault; keep its note."""
        if outcome.fault and not any(self._values[item].is_tainted for item in line.inputs):
            self._say("error", outcome.fault, line.where)
            self._values[ref].is_tainted = True
        if outcome.note.startswith("the shape"):
            self._cannot_say(outcome.note, line, [ref])
        elif outcome.note:
            self._values[ref].note = f"{outcome.note} ({line.where})"

    def _cannot_say(self, text: str, line: RecordedLine, targets: Sequence[Ref]) -> None:
        """Note that values are not typed. It is told where they reach a collective or a gradient."""
        for ref in targets:
            self._values[ref].is_tainted = True
            self._values[ref].untyped = text, line.where

    def _tell_untyped(self, refs: Iterable[Ref]) -> None:
        """Report values that are not typed."""
        for ref in refs:
            if (untyped := self._values[ref].untyped) is not None:
                self._say("unknown", *untyped)

    # factors

    def _follow(self, line: RecordedLine, ref: Ref) -> None:
        """Follow factors, means and notes from the inputs of a line to what it writes."""
        name, value = line.name, self._values[ref]
        inputs = [self._values[item] for item in line.inputs]
        codes = self._codes(ref)
        number = self._number(line)
        scaled = None if not number else abs(number) if "mul" in name else 1 / abs(number)
        if name in MOVES:
            value.is_divided = any(item.is_divided for item in inputs[:1])
        else:
            is_plain = not name.startswith("_foreach")
            value.is_divided = is_plain and scaled is not None and isclose(scaled, 1 / self._size, rel_tol=1e-6)
        factor = 1.0 if is_constant(name) else self._input_factor(line, ref)
        counts = self._line >= self._first_backward and (self._batches_differ or self._loss_is_mean())
        if scaled is not None and (counts or "P" in letters(codes)):
            factor *= self._own_part(scaled)
        value.set_factor(factor)
        is_mean = name in MEANS and has(codes, P) and averages(line)
        value.is_mean = is_mean or (not is_constant(name) and any(item.is_mean for item in inputs))
        value.is_tainted |= any(item.is_tainted for item in inputs)
        value.untyped = next((item.untyped for item in (value, *inputs) if item.untyped is not None), None)
        if has(codes, V):
            value.note = next((item.note for item in (value, *inputs) if item.note), "")

    def _input_factor(self, line: RecordedLine, ref: Ref) -> float:
        """Return the factor of a line's result: the largest of its inputs, unless a number scales a tensor.

        A number such as a norm has the factor of all gradients. A wrong number changes the factor of the tensor.
        """
        if line.name not in FACTORS or not isinstance(line.args[1], Ref) or line.args[1].shape:
            return self._values.largest_factor(line.inputs)
        scaled = line.args[0]
        if line.changes:
            scaled = ref
        elif isinstance(scaled, list | tuple):
            scaled = scaled[line.results.index(ref)]
        number = self._values[line.args[1]].factor
        usual = 1 / self._size if self._loss_is_mean() else 1.0
        return self._values[scaled].factor * (1.0 if isclose(number, 1.0) else number / usual)

    def _own_part(self, scaled: float) -> float:
        """Return this axis' part of a factor: the factor 1/15 is 1/5 on an axis of 5 ranks beside one of 3."""
        others = [size for axis, size in self._record.axes.items() if axis != self._axis]
        for size in {prod(chosen) for count in range(len(others) + 1) for chosen in combinations(others, count)}:
            if isclose(scaled, self._size * size, rel_tol=1e-5):
                return float(self._size)
            if isclose(scaled * self._size * size, 1.0, rel_tol=1e-5):
                return 1 / self._size
        return 1.0

    def _number(self, line: RecordedLine) -> float | None:
        """Return the number by which a line multiplies or divides, if it is equal on all ranks."""
        if line.name not in FACTORS or len(line.args) < 2:
            return None
        value = line.args[1]
        if isinstance(value, Ref) and value.shape == () and letters(self._codes(value)) == "R":
            value = float(self._record.values[value])
        return float(value) if isinstance(value, int | float) else None

    # gradients

    def _check_gradient(self, grad: Parameter) -> tuple[str, float]:
        """Compare the type of a gradient with that of its parameter. Return it with the gradient's factor."""
        parameter = next(item for item in self._record.parameters if item.path == grad.path)
        wanted = "S" if "S" in letters(self._codes(parameter.ref)) else "R"
        wanted = "P" if grad.placements.get(self._axis) == "partial" else wanted
        got, value = letters(self._codes(grad.ref)), self._values[grad.ref]
        self._tell_untyped([grad.ref])
        is_mean = self._loss_is_mean()
        factor = value.factor * (self._size if is_mean else 1.0)
        fits = got == wanted or (wanted == "S" and set(got.split("+")) <= {"S", "R"})
        if not value.is_tainted and not fits:
            note = f": {value.note}" if value.note else ""
            advice = f"; sum it over {self._axis}" if got == "P" else ""
            text = f"gradient is {MEANINGS[got[0]]}, must be {MEANINGS[wanted]}{note}{advice}"
            self._say("error", text, path=grad.path)
        elif not value.is_tainted and not isclose(factor, 1.0, rel_tol=1e-4):
            what = "mean" if is_mean else "sum"
            self._say("error", f"gradient is {factor:.4g} x the true one (the loss is a {what})", path=grad.path)
        return got, factor

    def _loss_is_mean(self) -> bool:
        """Return whether the loss is a mean over this rank's part, so that gradients are means over the ranks."""
        return self._record.loss is not None and self._values[self._record.loss].is_mean

    def _check_loss(self) -> None:
        loss = self._record.loss
        if loss is not None and not self._batches_differ and (types := letters(self._codes(loss))) != "R":
            self._say("warning", f"the loss is {MEANINGS[types[0]]}: the ranks report different numbers")

    def _say(self, kind: str, text: str, where: str = "", path: str = "") -> None:
        """Keep a fault. Parameters with the same fault share it."""
        key = text, "" if path else where
        fault = self._faults.get(key, Fault(self._axis, kind, text, where, self._line))
        paths = dict.fromkeys((*fault.parameters, path) if path else fault.parameters)
        self._faults[key] = replace(fault, parameters=tuple(paths))


def _aligned(record: StepRecord, other: StepRecord | None) -> dict[int, Shadow]:
    """Return the other rank's line for each line, as far as the ranks run the same operators."""
    shadows = other.shadows if other is not None else ()
    names, others = [item.name for item in record.shadows], [item.name for item in shadows]
    if names == others:
        return dict(enumerate(shadows))
    blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
    return {block.a + index: shadows[block.b + index] for block in blocks for index in range(block.size)}

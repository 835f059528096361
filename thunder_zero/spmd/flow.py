"""Walks a record along one axis of the mesh, and types each value that its lines write.

The type of an output follows from the operator itself: it runs again on two imagined ranks (``laws.py``). Operators
that only move elements move their codes. Where the neighbouring rank ran the same line with other numbers or on another
part of a tensor, the value differs between the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from thunder_zero.spmd.collectives import effect
from thunder_zero.spmd.laws import Experiment, Outcome, P, R, V, X, filled, halves, letters
from thunder_zero.spmd.operators import (
    CONSTANTS,
    COPIES,
    FACTORS,
    LOOKUPS,
    MEANS,
    MOVES,
    PARTS_OF_BACKWARD,
    SCATTERS,
    SELECTIONS,
    averages,
    key_of,
    runner,
)
from thunder_zero.spmd.record import RANDOM, SILENT, Parameter, RecordedLine, Ref, Shadow, StepRecord
from thunder_zero.tools.printing.words import summed_up


@dataclass(frozen=True, repr=False)
class Fault:
    """What is wrong, or cannot be said: ``kind`` is ``"error"``, ``"warning"`` or ``"unknown"``."""

    axis: str
    kind: str
    text: str
    where: str
    line: int
    parameters: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return summed_up(self, f"{self.kind} on {self.axis}: {self.text}")


@dataclass(frozen=True)
class GradientType:
    """The type of a gradient on an axis, and the factor by which it differs from the true gradient."""

    path: str
    type: str
    wanted: str
    factor: float


@dataclass(frozen=True)
class AxisTypes:
    """The types of all lines on one axis.

    ``lines`` has the types of what each line writes.
    """

    axis: str
    lines: tuple[tuple[str, ...], ...]
    faults: tuple[Fault, ...]
    gradients: tuple[GradientType, ...]
    assumed: tuple[str, ...]
    inputs_differ: bool
    experiments: int


@dataclass
class Memo:
    """Outcomes of experiments, shared by equal lines. Equal layers are typed once."""

    outcomes: dict[bytes, list[Outcome] | str] = field(default_factory=dict)


class Walk:
    """Types the values of a record on one axis."""

    def __init__(
        self,
        record: StepRecord,
        axis: str,
        *,
        neighbour: Sequence[Shadow] = (),
        whole: Sequence[Shadow] = (),
        wholes: Mapping[str, tuple[int, ...]] | None = None,
        batches_differ: bool,
        memo: Memo | None = None,
    ) -> None:
        """Prepare the walk.

        Args:
            record: the step on this rank.
            axis: the axis of the mesh.
            neighbour: the step on the next rank of the axis.
            whole: the step on a mesh with one rank on this axis, if it ran.
            wholes: the shapes of parameters on a mesh with one rank on this axis.
            batches_differ: whether ranks of the axis are meant to have batches of their own.
            memo: outcomes of earlier walks.
        """
        self._record, self._axis, self._size = record, axis, record.axes[axis]
        self._batches_differ, self._memo = batches_differ, memo or Memo()
        self._other = _aligned(record.shadows, neighbour)
        self._whole, self._wholes = _aligned(record.shadows, whole), wholes or {}
        self._codes: dict[int, tuple[int, Tensor]] = {}
        self._moved: dict[tuple[Any, ...], int] = {}
        self._over: dict[Ref, Tensor] = {}
        self._factors: dict[int, float] = {}
        self._means: set[int] = set()
        self._divided: set[int] = set()
        self._tainted: set[int] = set()
        self._untyped: dict[int, tuple[str, str]] = {}  # why, and the line
        self._notes: dict[int, str] = {}
        self._faults: dict[tuple[str, str], Fault] = {}
        self._assumed: set[str] = set()
        self._known: dict[int, Tensor] = {}
        self._line = 0
        self._experiments = 0
        self._virtual = -1
        self._differing_inputs = False
        lines = record.lines
        self._first_backward = next((index for index, line in enumerate(lines) if line.backward), len(lines))
        self._placed = {item.ref.storage: item for item in (*record.buffers, *record.parameters)}

    def run(self) -> AxisTypes:
        """Type all lines and check the gradients."""
        gradients: list[GradientType] = []
        self._place()
        due: dict[int, list[Parameter]] = {}
        for item in self._record.gradients:
            due.setdefault(item.line, []).append(item)
        types = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for index, line in enumerate(self._record.lines):
                self._line = index
                gradients += self._check_gradients(due.pop(self._line, []))
                types.append(self._type(line))
            self._line = len(self._record.lines)
            for items in due.values():
                gradients += self._check_gradients(items)
        self._check_loss()
        return AxisTypes(
            self._axis,
            tuple(types),
            tuple(self._faults.values()),
            tuple(gradients),
            tuple(sorted(self._assumed)),
            self._differing_inputs,
            self._experiments,
        )

    # codes of storages

    def _home(self, ref: Ref) -> int:
        return self._moved.get((ref.storage, ref.offset, ref.shape, ref.stride), ref.storage)

    def _flat(self, home: int, ref: Ref) -> Tensor:
        """Return the codes of a storage, as many as it needs for a tensor."""
        width, need = ref.dtype.itemsize, _end(ref)
        known, codes = self._codes.get(home, (width, filled([0], R)))
        if known != width:
            codes = codes.repeat_interleave(known // width) if known > width else codes[:: width // known].clone()
        if len(codes) < need:
            codes = torch.cat([codes, filled([need - len(codes)], R)])
        self._codes[home] = width, codes
        return codes

    def codes(self, ref: Ref) -> Tensor:
        """Return the codes of a tensor: a view of those of its storage."""
        if not ref.nbytes:
            return filled(ref.shape, R)
        if ref in self._over:
            return self._over[ref]
        return self._flat(self._home(ref), ref).as_strided(ref.shape, ref.stride, ref.offset)

    def _give(self, ref: Ref, codes: Tensor | int) -> None:
        if ref.nbytes:
            into = self._flat(self._home(ref), ref).as_strided(ref.shape, ref.stride, ref.offset)
            codes = codes.reshape(ref.shape) if isinstance(codes, Tensor) else filled(ref.shape, codes)
            for dim in (dim for dim, step in enumerate(ref.stride) if step == 0):  # expanded: one element for all
                into, codes = into.narrow(dim, 0, 1), codes.narrow(dim, 0, 1)
            into.copy_(codes)

    # inputs

    def _place(self) -> None:
        """Type parameters and buffers by their placements."""
        for item in self._placed.values():
            where = item.placements.get(self._axis)
            if isinstance(where, int):
                self._give(item.ref, _slice(item.ref.shape, where))
            elif where == "partial":
                self._give(item.ref, P)
        for storage, (ref, placements) in self._record.slices.items():
            where = placements.get(self._axis)
            if isinstance(where, int):
                self._give(ref, _slice(ref.shape, where))
                self._known[storage] = self._flat(storage, ref).clone()

    def _admit(self, line: RecordedLine) -> None:
        """Type values that come from outside of the record, by comparing them with the neighbour's."""
        other, whole = self._other.get(self._line), self._whole.get(self._line)
        for index, ref in enumerate(line.fresh):
            item = self._placed.get(ref.storage)
            if (item is not None and self._axis in item.placements) or ref.storage in self._record.equalised:
                continue
            shadow = self._record.shadows[self._line].fresh
            mine = shadow[index] if index < len(shadow) else None
            theirs = other.fresh[index] if other is not None and index < len(other.fresh) else mine
            full = whole.fresh[index][0] if whole is not None and index < len(whole.fresh) else ref.shape
            if item is not None:
                full = self._wholes.get(item.path, full)
            dim = _cut(item.ref.shape if item is not None else ref.shape, full)
            if item is not None:
                self._admit_parameter(item, dim, mine != theirs)
            elif mine != theirs:
                self._differing_inputs = True
                self._give(ref, _slice(ref.shape, 0 if dim is None else dim))
            elif dim is not None and not self._batches_differ:
                self._give(ref, _slice(ref.shape, dim))

    def _admit_parameter(self, item: Parameter, dim: int | None, differs: bool) -> None:
        if dim is not None:
            self._give(item.ref, _slice(item.ref.shape, dim))
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
        return tuple(letters(self.codes(item)) for item in targets)

    def _parts_of_rank(self, line: RecordedLine) -> dict[Ref, Tensor]:
        """Return codes of inputs that are another part of an equal value on the neighbouring rank."""
        other = self._other.get(self._line)
        result: dict[Ref, Tensor] = {}
        for ref, offset in zip(line.inputs, other.offsets if other is not None else (), strict=False):
            if offset != ref.offset and ref.nbytes and not bool(self.codes(ref).any()):
                gaps = (
                    dim for dim in range(1, len(ref.shape)) if ref.stride[dim - 1] > ref.shape[dim] * ref.stride[dim]
                )
                result[ref] = _slice(ref.shape, next(gaps, 0))
        return result

    def _other_numbers(self) -> tuple[Any, ...] | None:
        """Return the numbers among the neighbour's arguments, or None if it ran the same line."""
        mine, other = self._record.shadows[self._line], self._other.get(self._line)
        if other is None:
            return None
        return other.scalars if other.scalars != mine.scalars else None

    def _view(self, line: RecordedLine) -> None:
        """Pass codes on to a view; a view of another part on each rank is a slice of its own."""
        source = line.inputs[0]
        if len(line.results) == 1 and self._over:
            (ref,) = line.results
            codes = self._through(line, self._over)
            self._separate(ref, codes)
            return
        other = self._other.get(self._line)
        mine = self._record.shadows[self._line]
        if len(line.results) == 1 and other is not None and other.outputs != mine.outputs:
            (ref,) = line.results
            if other.scalars != mine.scalars or other.offsets == mine.offsets:
                codes = self._flat(self._home(source), ref).as_strided(ref.shape, ref.stride, ref.offset).clone()
                if not bool(codes.any()):
                    codes = _slice(ref.shape, _cut(ref.shape, source.shape))
                self._separate(ref, codes)
                return
        for ref in line.results:
            home = self._home(source)
            if home != source.storage:
                self._moved[ref.storage, ref.offset, ref.shape, ref.stride] = home

    def _through(self, line: RecordedLine, over: Mapping[Ref, Tensor]) -> Tensor:
        args, kwargs = tree_map_only(
            Ref, lambda ref: over[ref].clone() if ref in over else self.codes(ref).clone(), (line.args, line.kwargs)
        )
        return line.operator(*args, **kwargs).clone()  # type: ignore[no-any-return]

    def _separate(self, ref: Ref, codes: Tensor) -> None:
        """Give a view codes of its own, as the elements beside it belong to other ranks."""
        home, self._virtual = self._virtual, self._virtual - 1
        self._moved[ref.storage, ref.offset, ref.shape, ref.stride] = home
        self._give(ref, codes)

    def _collective(self, line: RecordedLine) -> None:
        assert line.collective is not None
        for inputs, outputs in line.collective.pairs(line.operator, line.args, line.kwargs, line.results):
            if not inputs:
                continue
            codes = [self.codes(item).clone() for item in inputs]
            zero = all(not bool(self._record.values[item].any()) for item in inputs if item in self._record.values)
            result = effect(line.collective, self._axis, self._size, codes, [item.shape for item in outputs], zero=zero)
            factor = self._largest_factor(inputs) * result.factor
            tainted = any(self._home(item) in self._tainted for item in inputs)
            self._tell_untyped(inputs)
            if result.fault and not tainted:
                note = next((self._notes[self._home(item)] for item in inputs if self._home(item) in self._notes), "")
                text = f"{result.fault}: {note}" if note and "no share" in result.fault else result.fault
                self._say("error", text, line.where)
                tainted = True
            for ref, new in zip(outputs, result.codes, strict=True):
                self._give(ref, new)
                self._set_factor(ref, factor)
                _toggle(self._tainted, self._home(ref), tainted)
        if not line.collective.axes:
            self._say("error", f"{line.collective.kind} over a group that is no axis of the mesh", line.where)

    # operators

    def _compute(self, line: RecordedLine, targets: Sequence[Ref]) -> None:
        for ref, codes in zip(targets, self._codes_of(line, targets), strict=True):
            known = self._known.get(ref.storage)
            if known is not None and line.name in MOVES and _is_contiguous(ref):
                part = known[ref.offset : _end(ref)]
                codes = torch.cat([part, codes.reshape(-1)[len(part) :]])
            self._give(ref, codes)
        for ref in targets:
            self._follow(line, ref)

    def _codes_of(self, line: RecordedLine, targets: Sequence[Ref]) -> list[Tensor]:
        """Return the codes of what a line writes."""
        name, numbers = line.name, self._other_numbers()
        codes = [self.codes(item).clone() for item in line.inputs]
        if numbers is not None and self._sizes_differ() and line.backward:
            self._cannot_say(f"the sizes of {name} differ between the ranks", line, targets)
        if name in ("arange", "linspace") and numbers is not None:
            return [halves(ref.shape) for ref in targets]
        if name in RANDOM and (not line.inputs or name.endswith("_") or self._draws_differ()):
            return [self._random(name, codes, ref) for ref in targets]
        if numbers is None and not any(bool(item.any()) for item in codes):
            return [filled(ref.shape, R) for ref in targets]
        if name in CONSTANTS or name.endswith("_like") or name.startswith("new_"):
            return [filled(ref.shape, R) for ref in targets]
        if name in MOVES:
            return self._move(line, targets)
        if "batch_norm" in name and self._batches_differ:
            return self._batch_norm(line, codes[0] if not line.backward else codes[1], targets)
        if numbers is None and {letter for item in codes for letter in letters(item).split("+")} <= {"R", "X"}:
            shapes = [item.shape for item in codes if bool((item == X).any())]
            if all(ref.shape in shapes for ref in targets):
                return [filled(ref.shape, X) for ref in targets]
        return self._experiment(line, codes, numbers, targets)

    def _sizes_differ(self) -> bool:
        mine, other = self._record.shadows[self._line], self._other[self._line]
        return [shape for _, shape in mine.outputs] != [shape for _, shape in other.outputs]

    def _draws_differ(self) -> bool:
        """Return whether the ranks draw different random numbers. Ranks with batches of their own may draw alike."""
        other = self._other.get(self._line)
        differ = other is not None and other.drawn != self._record.shadows[self._line].drawn
        return self._batches_differ or differ

    def _random(self, name: str, codes: Sequence[Tensor], ref: Ref) -> Tensor:
        if not self._draws_differ():
            return filled(ref.shape, R)
        alike = (item for item in codes if item.shape == ref.shape and bool(item.any()))
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
            return [self.codes(line.inputs[0]).clone()]
        if name == "copy_":
            return [self.codes(line.inputs[1]).expand(line.inputs[0].shape).clone()]
        if name == "all_gather_copy_in":
            self._give(targets[0], torch.cat([self.codes(ref).reshape(-1) for ref in line.args[0]]))
            return [self.codes(ref).clone() for ref in targets]  # the second target contains the first
        args, kwargs = tree_map_only(Ref, lambda ref: self.codes(ref).float(), (line.args, line.kwargs))
        result = line.operator(*(args[:2] if name == "constant_pad_nd" else args), **kwargs)
        result = kwargs.get("out", args[0] if name.startswith("_foreach_copy_") else result)
        return [item.byte() for item in tree_leaves(result) if isinstance(item, Tensor)]

    def _experiment(
        self, line: RecordedLine, codes: list[Tensor], numbers: tuple[Any, ...] | None, targets: Sequence[Ref]
    ) -> list[Tensor]:
        """Run the line on two imagined ranks, or remember the outcome of an equal line."""
        masks = zip(codes, line.inputs, strict=True)
        if line.name in SELECTIONS and any(item.dtype is torch.bool and bool(code.any()) for code, item in masks):
            self._cannot_say(f"the shape of {line.name} depends on the data", line, targets)
            return [filled(ref.shape, V) for ref in targets]
        assumed = self._masked_part(line, codes, numbers, targets)
        if assumed is not None:
            return assumed
        outcomes = self._outcomes(line, codes, numbers, targets)
        if not isinstance(outcomes, str) and any(item.fault for item in outcomes):
            shares = [  # a bias divided by the number of ranks is a share of the bias
                filled(item.shape, P) if self._home(ref) in self._divided and not bool(item.any()) else item
                for ref, item in zip(line.inputs, codes, strict=True)
            ]
            again = self._outcomes(line, shares, numbers, targets)
            outcomes = outcomes if isinstance(again, str) or any(item.fault for item in again) else again
        if isinstance(outcomes, str):
            self._cannot_say(f"{line.name} could not run again: {outcomes}", line, targets)
            return [filled(ref.shape, V) for ref in targets]
        for ref, outcome in zip(targets, outcomes, strict=True):
            self._hear(line, ref, outcome)
        return [outcome.codes for outcome in outcomes]

    def _outcomes(
        self, line: RecordedLine, codes: list[Tensor], numbers: tuple[Any, ...] | None, targets: Sequence[Ref]
    ) -> list[Outcome] | str:
        """Return the outcomes of an experiment, or why it failed."""
        values = [self._record.values[ref] for ref in line.inputs]
        key = key_of(line, codes, values, numbers, self._size)
        if key not in self._memo.outcomes:
            self._experiments += 1
            try:
                experiment = Experiment(runner(line, numbers), values, codes, ranked=numbers is not None)
                shapes = [ref.shape for ref in targets]
                self._memo.outcomes[key] = experiment.outcomes(line.name, shapes, self._size)
            except Exception as error:
                self._memo.outcomes[key] = f"{type(error).__name__}: {str(error)[:80]}"
        return self._memo.outcomes[key]

    def _hear(self, line: RecordedLine, ref: Ref, outcome: Outcome) -> None:
        """Report the fault of an outcome, unless it follows from an earlier fault; keep its note."""
        if outcome.fault and not any(self._home(item) in self._tainted for item in line.inputs):
            self._say("error", outcome.fault, line.where)
            self._tainted.add(self._home(ref))
        if outcome.note.startswith("the shape"):
            self._cannot_say(outcome.note, line, [ref])
        elif outcome.note:
            self._notes[self._home(ref)] = f"{outcome.note} ({line.where})"

    def _cannot_say(self, text: str, line: RecordedLine, targets: Sequence[Ref]) -> None:
        """Note that values are not typed. It is told where they reach a collective or a gradient."""
        for ref in targets:
            self._tainted.add(self._home(ref))
            self._untyped[self._home(ref)] = text, line.where

    def _tell_untyped(self, refs: Iterable[Ref]) -> None:
        """Report values that are not typed."""
        for text, where in [self._untyped[self._home(ref)] for ref in refs if self._home(ref) in self._untyped]:
            self._say("unknown", text, where)

    def _masked_part(
        self, line: RecordedLine, codes: Sequence[Tensor], numbers: tuple[Any, ...] | None, targets: Sequence[Ref]
    ) -> list[Tensor] | None:
        """Type a look-up in this rank's part of a table, which a mask makes a share of a sum; None for other lines."""
        name, ref = line.name, targets[0]
        indices = [code for code, item in zip(codes, line.inputs, strict=True) if not item.dtype.is_floating_point]
        if numbers is None and not any(bool((item == V).any()) for item in indices):
            return None
        if name in LOOKUPS and len(codes) > 1 and any("S" in letters(item) for item in codes):
            self._assumed.add(
                f"{name} in a rank's own part of a table is masked where the index belongs to other ranks"
            )
            return [filled(item.shape, P) for item in targets]
        if name in SCATTERS and not ref.dtype.is_floating_point:
            return [filled(item.shape, V) for item in targets]
        if name.startswith(("index_put", "masked_fill")) and bool((codes[0] == P).any()):
            return [filled(item.shape, P) for item in targets]
        if name in SCATTERS:
            self._assumed.add(f"{name} into a rank's own part of a table leaves out the rows of other ranks")
            return [halves(item.shape, 0 if name.startswith("embedding") else -1) for item in targets]
        return [filled(item.shape, P) for item in targets] if name in PARTS_OF_BACKWARD else None

    # factors

    def _largest_factor(self, refs: Iterable[Ref]) -> float:
        factors = [self._factors.get(self._home(ref), 1.0) for ref in refs]
        return max(factors, key=lambda factor: abs(math.log(factor)), default=1.0)

    def _set_factor(self, ref: Ref, factor: float) -> None:
        if math.isclose(factor, 1.0, rel_tol=1e-9):
            self._factors.pop(self._home(ref), None)
        else:
            self._factors[self._home(ref)] = factor

    def _follow(self, line: RecordedLine, ref: Ref) -> None:
        """Follow factors, means and notes from the inputs of a line to what it writes."""
        name, home = line.name, self._home(ref)
        inputs = [self._home(item) for item in line.inputs]
        is_fresh = name in CONSTANTS or name.endswith("_like") or name.startswith("new_")
        number = self._number(line)
        scaled = None if not number else abs(number) if "mul" in name else 1 / abs(number)
        moves_share = name in MOVES and any(item in self._divided for item in inputs[:1])
        is_share = name in ("mul", "mul_", "div", "div_") and scaled is not None
        _toggle(
            self._divided, home, moves_share or (is_share and math.isclose(scaled or 0, 1 / self._size, rel_tol=1e-6))
        )
        factor = 1.0 if is_fresh else self._input_factor(line, ref)
        counts = self._line >= self._first_backward and (self._batches_differ or self._loss_is_mean())
        if scaled is not None and (counts or "P" in letters(self.codes(ref))):
            factor *= self._own_part(scaled)
        self._set_factor(ref, factor)
        is_mean = name in MEANS and bool((self.codes(ref) == P).any()) and averages(line)
        _toggle(self._means, home, is_mean or (not is_fresh and any(item in self._means for item in inputs)))
        _toggle(self._tainted, home, home in self._tainted or any(item in self._tainted for item in inputs))
        untyped = next((self._untyped[item] for item in (home, *inputs) if item in self._untyped), None)
        if untyped is not None:
            self._untyped[home] = untyped
        if bool((self.codes(ref) == V).any()):
            note = next((self._notes[item] for item in inputs if item in self._notes), "")
            if note:
                self._notes.setdefault(home, note)

    def _input_factor(self, line: RecordedLine, ref: Ref) -> float:
        """Return the factor of a line's result: the largest of its inputs, unless a number scales a tensor.

        A number such as a norm has the factor of all gradients. A wrong number changes the factor of the tensor.
        """
        if line.name not in FACTORS or not isinstance(line.args[1], Ref) or line.args[1].shape:
            return self._largest_factor(line.inputs)
        scaled = line.args[0]
        if line.changes:
            scaled = ref
        elif isinstance(scaled, list | tuple):
            scaled = scaled[line.results.index(ref)]
        number = self._largest_factor([line.args[1]])
        usual = 1 / self._size if self._loss_is_mean() else 1.0
        return self._largest_factor([scaled]) * (1.0 if math.isclose(number, 1.0) else number / usual)

    def _own_part(self, scaled: float) -> float:
        """Return this axis' part of a factor: the factor 1/15 is 1/5 on an axis of 5 ranks beside one of 3."""
        others = [size for axis, size in self._record.axes.items() if axis != self._axis]
        for size in {prod(chosen) for count in range(len(others) + 1) for chosen in combinations(others, count)}:
            for factor in (self._size, 1 / self._size):
                if math.isclose(scaled, factor * (size if factor > 1 else 1 / size), rel_tol=1e-5):
                    return float(factor)
        return 1.0

    def _number(self, line: RecordedLine) -> float | None:
        """Return the number by which a line multiplies or divides, if it is equal on all ranks."""
        if line.name not in FACTORS or len(line.args) < 2:
            return None
        value = line.args[1]
        if isinstance(value, Ref) and value.shape == () and letters(self.codes(value)) == "R":
            value = float(self._record.values[value])
        return float(value) if isinstance(value, int | float) else None

    # gradients

    def _check_gradients(self, gradients: Sequence[Parameter]) -> list[GradientType]:
        return [self._gradient(item) for item in gradients]

    def _gradient(self, grad: Parameter) -> GradientType:
        """Compare the type of a gradient with that of its parameter."""
        parameter = next(item for item in self._record.parameters if item.path == grad.path)
        wanted = "S" if "S" in letters(self.codes(parameter.ref)) else "R"
        wanted = "P" if grad.placements.get(self._axis) == "partial" else wanted
        got, home = letters(self.codes(grad.ref)), self._home(grad.ref)
        self._tell_untyped([grad.ref])
        mean = self._loss_is_mean()
        factor = self._factors.get(home, 1.0) * (self._size if mean else 1.0)
        fits = got == wanted or (wanted == "S" and set(got.split("+")) <= {"S", "R"})
        if home not in self._tainted and not fits:
            note = f": {self._notes[home]}" if home in self._notes else ""
            text = f"gradient is {MEANINGS[got[0]]}, must be {MEANINGS[wanted]}"
            advice = f"; sum it over {self._axis}" if got == "P" else ""
            self._say("error", f"{text}{note}{advice}", "", grad.path)
        elif home not in self._tainted and not math.isclose(factor, 1.0, rel_tol=1e-4):
            what = "mean" if mean else "sum"
            self._say("error", f"gradient is {factor:.4g} x the true one (the loss is a {what})", "", grad.path)
        return GradientType(grad.path, got, wanted, factor)

    def _loss_is_mean(self) -> bool:
        """Return whether the loss is a mean over this rank's part, so that gradients are means over the ranks."""
        return self._record.loss is not None and self._home(self._record.loss) in self._means

    def _check_loss(self) -> None:
        loss = self._record.loss
        if loss is not None and not self._batches_differ and (types := letters(self.codes(loss))) != "R":
            self._say("warning", f"the loss is {MEANINGS[types[0]]}: the ranks report different numbers", "")

    def _say(self, kind: str, text: str, where: str, path: str = "") -> None:
        key = text, where if not path else ""
        before = self._faults.get(key)
        if before is None:
            self._faults[key] = Fault(self._axis, kind, text, where, self._line, (path,) if path else ())
        elif path and path not in before.parameters:
            self._faults[key] = replace(before, parameters=(*before.parameters, path))


MEANINGS = {
    "R": "equal on all ranks",
    "S": "a slice",
    "P": "a share of a sum that is never summed",
    "N": "a share of a norm",
    "V": "different on each rank",
    "X": "random on each rank",
}


def _aligned(mine: Sequence[Shadow], other: Sequence[Shadow]) -> dict[int, Shadow]:
    """Return the other rank's line for each line, as far as the ranks run the same operators."""
    names, others = [item.name for item in mine], [item.name for item in other]
    if names == others:
        return dict(enumerate(other))
    blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
    return {block.a + index: other[block.b + index] for block in blocks for index in range(block.size)}


def _slice(shape: Sequence[int], dim: int | None) -> Tensor:
    """Return the codes of a slice; a dimension of one element is not halved."""
    return halves(shape, dim if dim is not None and dim < len(shape) and shape[dim] > 1 else None)


def _cut(shape: Sequence[int], full: Sequence[int]) -> int | None:
    """Return the dimension along which a shape is smaller than the full shape."""
    if len(shape) != len(full):
        return None
    return next((dim for dim, (size, whole) in enumerate(zip(shape, full, strict=True)) if size != whole), None)


def _end(ref: Ref) -> int:
    return ref.offset + sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True)) + 1


def _is_contiguous(ref: Ref) -> bool:
    return _end(ref) - ref.offset == torch.Size(ref.shape).numel() and list(ref.stride) == sorted(ref.stride)[::-1]


def _toggle(items: set[int], item: int, present: bool) -> None:
    (items.add if present else items.discard)(item)

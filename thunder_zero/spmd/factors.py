"""The numbers by which a step multiplies and divides, and what they mean on one axis of the mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isclose, prod

from torch import Tensor

from thunder_zero.spmd.laws import Outcome, P, has, is_sliced, letters
from thunder_zero.spmd.lines import RecordedLine, Ref, StepRecord
from thunder_zero.spmd.rules import FACTORS, averages
from thunder_zero.spmd.storages import TypedStorages


@dataclass(frozen=True)
class Factors:
    record: StepRecord
    axis: str
    values: TypedStorages
    codes: Callable[[Ref], Tensor]

    @property
    def size(self) -> int:
        return self.record.axes[self.axis]

    def of(self, line: RecordedLine, inputs: Sequence[Ref], ref: Ref, outcome: Outcome, *, counts: bool) -> float:
        """Return the factor of what a line writes. ``counts``: whether a division changes what a gradient must be."""
        if line.name == "ones_like" and not ref.shape and self.values[line.inputs[0]].is_mean:
            return float(self.size)  # backward begins: the gradients of means are summed, and divided by the ranks
        if line.name in FACTORS and line.name.endswith("_") and self.values.largest_factor([ref]) != 1:
            inputs = [ref]  # a wrong gradient makes the norm wrong, which is no fault of its own
        factor = self.values.largest_factor(inputs) * outcome.factor
        if averages(line) and not line.tracked and any(is_sliced(self.codes(item)) for item in inputs):
            factor *= self.size if counts else 1  # gradients of single items, as torch.func.vmap computes them
        return factor * self.own_part(line) if inputs and (counts or has(outcome.codes, P)) else factor

    def loss_is_mean(self) -> bool:
        """Return whether the loss is a mean over this rank's part, so that gradients are means over the ranks."""
        loss = self.record.loss
        return loss is not None and self.values[loss].is_mean

    def divides(self, line: RecordedLine) -> bool:
        """Return whether a line divides a value by the number of ranks."""
        return not line.name.startswith("_foreach") and isclose(self._scaled(line), 1 / self.size, rel_tol=1e-6)

    def divides_by_own_count(self, line: RecordedLine) -> bool:
        """Return whether a line divides by a number that is no count of the whole batch."""
        scaled, number = self._scaled(line), line.args[-1] if line.args else None
        is_total = isinstance(number, Ref) and self.values[number].is_total
        return scaled < 1 and not is_total and round(1 / scaled) % self.size != 0

    def own_part(self, line: RecordedLine) -> float:
        """Return this axis' part of a line's factor: the factor 1/15 is 1/5 on an axis of 5 ranks beside one of 3."""
        scaled = self._scaled(line)
        others = [size for axis, size in self.record.axes.items() if axis != self.axis]
        for size in {prod(chosen) for count in range(len(others) + 1) for chosen in combinations(others, count)}:
            if isclose(scaled, self.size * size, rel_tol=1e-5):
                return float(self.size)
            if isclose(scaled * self.size * size, 1.0, rel_tol=1e-5):
                return 1 / self.size
        return 1.0

    def _scaled(self, line: RecordedLine) -> float:
        """Return the number by which a line multiplies, or 1 if there is none that is equal on all ranks."""
        if line.name not in FACTORS or len(line.args) < 2:
            return 1.0
        number = line.args[-1]
        if isinstance(number, Ref) and number.shape == () and letters(self.codes(number)) == "R":
            number = float(self.record.values[number])
        if not isinstance(number, int | float) or not number:
            return 1.0
        return 1 / abs(number) if "div" in line.name else abs(number)

"""Compares the gradients, the loss and the parameters of a step on one axis with what they must be."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from math import isclose

from thunder_zero.spmd.laws import letters
from thunder_zero.spmd.lines import Parameter, StepRecord
from thunder_zero.spmd.storages import TypedStorages
from thunder_zero.spmd.told import Told
from thunder_zero.spmd.verdict import TIMES_TRUE

MEANINGS = {
    "R": "equal on all ranks",
    "S": "a slice",
    "P": "a share of a sum that is never summed",
    "N": "a share of a norm",
    "V": "different on each rank",
    "X": "random on each rank",
}


@dataclass(frozen=True)
class Ending:
    record: StepRecord
    axis: str
    values: TypedStorages
    told: Told

    def gradient(self, grad: Parameter, *, is_mean: bool, is_summed: bool) -> tuple[str, float]:
        """Compare the type of a gradient with that of its parameter. Return it with the gradient's factor.

        ``is_mean``: the loss is a mean. ``is_summed``: a copy of the gradient is summed, which makes the new parameter.
        """
        parameter = next(item for item in self.record.parameters if item.path == grad.path)
        is_slice = isinstance(parameter.placements.get(self.axis), int)
        wanted = "S" if is_slice or "S" in letters(self.values.codes(parameter.ref)) else "R"
        wanted = "P" if grad.placements.get(self.axis) == "partial" else wanted
        got, value = letters(self.values.codes(grad.ref)), self.values[grad.ref]
        factor = self.values.largest_factor([grad.ref])
        self.told.unknown([value.cause])
        if got == "P" and is_summed and grad.path not in self.record.stepped:
            return got, 1.0
        if value.is_spoiled:
            return got, factor
        if got != wanted and not (wanted == "S" and set(got.split("+")) <= {"S", "R"}):
            note = f": {value.cause.text} ({value.cause.where})" if value.cause is not None else ""
            advice = f"; sum it over {self.axis}" if got == "P" else ""
            text = f"gradient is {MEANINGS[got[0]]}, must be {MEANINGS[wanted]}{note}{advice}"
            self.told.say("error", text, path=grad.path)
        elif not isclose(factor, 1.0, rel_tol=1e-4):
            loss = f"(the loss is a {'mean' if is_mean else 'sum'})"
            self.told.say("error", f"gradient is {factor:.4g} {TIMES_TRUE} {loss}", path=grad.path)
        return got, factor

    def parameters(self, cut: Container[int]) -> None:
        """Say which parameters an update by hand leaves different. ``cut``: storages that the user cut."""
        for item in self.record.parameters:
            types, value = letters(self.values.codes(item.ref)), self.values[item.ref]
            is_cut = isinstance(item.placements.get(self.axis), int) or item.ref.storage in cut
            is_updated = item.ref.writes and item.path not in self.record.stepped
            if is_updated and types != "R" and not is_cut and not value.is_spoiled:
                self.told.say("error", f"after the step its values are {MEANINGS[types[0]]}", path=item.path)

    def loss(self) -> None:
        loss = self.record.loss
        if loss is not None and (types := letters(self.values.codes(loss))) != "R":
            self.told.say("warning", f"the loss is {MEANINGS[types[0]]}: the ranks report different numbers")

"""The faults of a step on one axis, each told once: of its lines, and of what it ends with."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from math import isclose

from thunder_zero.spmd.laws import Outcome, V, filled, letters
from thunder_zero.spmd.lines import Parameter, RecordedLine, Shadow, StepRecord
from thunder_zero.spmd.reaching import gathers_without_gradient, lines_that_matter
from thunder_zero.spmd.storages import TypedStorages
from thunder_zero.spmd.verdict import TIMES_TRUE, Fault

MEANINGS = {
    "R": "equal on all ranks",
    "S": "a slice",
    "P": "a share of a sum that is never summed",
    "N": "a share of a norm",
    "V": "different on each rank",
    "X": "random on each rank",
}
NO_GRADIENT = (
    "all_gather has no backward, so that other ranks' losses give this rank's values no gradient; use "
    "torch.distributed.nn.functional.all_gather"
)


class Told:
    """``line`` is the index of the line that is typed now."""

    def __init__(self, axis: str) -> None:
        self._axis, self.line = axis, 0
        self._faults: dict[tuple[str, str], Fault] = {}
        self._assumed: set[str] = set()

    @property
    def faults(self) -> tuple[Fault, ...]:
        return tuple(self._faults.values())

    @property
    def assumed(self) -> tuple[str, ...]:
        return tuple(sorted(self._assumed))

    def say(self, kind: str, text: str, where: str = "", path: str = "") -> None:
        """Keep a fault. Parameters with the same fault share it."""
        key = text, "" if path else where
        fault = self._faults.get(key, Fault(self._axis, kind, text, where, self.line))
        paths = dict.fromkeys((*fault.parameters, path) if path else fault.parameters)
        self._faults[key] = replace(fault, parameters=tuple(paths))

    def hear(self, outcome: Outcome, line: RecordedLine, note: Fault | None) -> Fault | None:
        """Tell an outcome's fault. Return it, or what may be told later, as the cause of later faults."""
        text, kind = outcome.text, outcome.kind
        if not text:
            return None
        if kind == "assumed":
            self._assumed.add(text)
        if kind in ("error", "warning"):
            because = f": {note.text} ({note.where})" if note is not None and line.collective is not None else ""
            self.say(kind, f"{text}{because}", line.where)
        if kind in ("assumed", "warning"):
            return None
        return Fault(self._axis, kind, text, line.where, self.line)

    def unknown(self, causes: Iterable[Fault | None]) -> None:
        """Report values that are not typed, where they reach a collective or a gradient."""
        for cause in causes:
            if cause is not None and cause.kind == "unknown":
                self.say("unknown", cause.text, cause.where)


@dataclass(frozen=True)
class Ending:
    """Compares the gradients, the loss and the parameters of a step on one axis with what they must be."""

    record: StepRecord
    axis: str
    values: TypedStorages
    told: Told
    averaged: Set[int]  # first storages of parameters of models that are averaged
    gradients: dict[str, tuple[str, float]] = field(default_factory=dict)  # types and factors, keyed by path
    reductions: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def gradient(self, grad: Parameter, *, is_summed: bool) -> None:
        """Compare the type of a gradient with that of its parameter.

        ``is_summed``: a copy of the gradient is summed, which makes the new parameter.
        """
        parameter = next(item for item in self.record.parameters if item.path == grad.path)
        is_slice = isinstance(parameter.placements.get(self.axis), int)
        wanted = "S" if is_slice or "S" in letters(self.values.codes(parameter.ref)) else "R"
        wanted = "P" if grad.placements.get(self.axis) == "partial" else wanted
        got, value = letters(self.values.codes(grad.ref)), self.values[grad.ref]
        is_kept = got == "P" and is_summed and grad.path not in self.record.stepped
        factor = 1.0 if is_kept else self.values.largest_factor([grad.ref])
        self.gradients[grad.path], self.reductions[grad.path] = (got, factor), value.reductions
        self.told.unknown([value.cause])
        is_own = got != "R" and parameter.first in self.averaged
        if is_kept or is_own or value.is_spoiled:
            return
        if got != wanted and not (wanted == "S" and set(got.split("+")) <= {"S", "R"}):
            note = f": {value.cause.text} ({value.cause.where})" if value.cause is not None else ""
            advice = f"; sum it over {self.axis}" if got == "P" else ""
            text = f"gradient is {MEANINGS[got[0]]}, must be {MEANINGS[wanted]}{note}{advice}"
            self.told.say("error", text, path=grad.path)
        elif not isclose(factor, 1.0, rel_tol=1e-4):
            is_mean = self.record.loss is not None and self.values[self.record.loss].is_mean
            loss = "a mean" if is_mean else "equal on all ranks" if self._loss_types == "R" else "a sum"
            self.told.say("error", f"gradient is {factor:.4g} {TIMES_TRUE} (the loss is {loss})", path=grad.path)

    def step_alone(self, paths: Set[str]) -> None:
        """Type parameters that an optimizer is about to step on one rank, and not on the next one."""
        for item in self.record.parameters:
            if item.path in paths and not self.values[item.ref].is_shard:
                self.values.give(item.ref, filled(item.ref.shape, V))

    def parameters(self, cut: Container[int]) -> None:
        """Say which parameters an update leaves different. ``cut``: storages that the user cut."""
        for item in self.record.parameters:
            types, value = letters(self.values.codes(item.ref)), self.values[item.ref]
            is_cut = isinstance(item.placements.get(self.axis), int) or item.ref.storage in cut
            is_averaged, factor = item.first in self.averaged, self.values.largest_factor([item.ref])
            is_told = item.path in self.record.stepped and self.gradients.get(item.path, ("R", 1.0))[0] != "R"
            is_updated = is_averaged or (item.ref.writes and not is_told)
            if is_averaged and types == "R" and not isclose(factor, 1.0, rel_tol=1e-4):
                self.told.say("error", f"after the step it is {factor:.4g} {TIMES_TRUE}", path=item.path)
            elif is_updated and types != "R" and not is_cut and not value.is_spoiled:
                self.told.say(
                    "error", f"after the step its values are {MEANINGS[types.strip('R+')[0]]}", path=item.path
                )

    @property
    def _loss_types(self) -> str:
        return "R" if self.record.loss is None else letters(self.values.codes(self.record.loss))

    def loss(self) -> None:
        if self._loss_types != "R":
            self.told.say("warning", f"the loss is {MEANINGS[self._loss_types[0]]}: the ranks report different numbers")

    def faults(self, neighbour: Mapping[int, Shadow]) -> Iterator[Fault]:
        """Yield what is wrong. Of values that reach no gradient, such as metrics, it is a warning."""
        matter = lines_that_matter(self.record, neighbour)
        for index, gather in gathers_without_gradient(self.record):
            if index in matter and gather.collective is not None and self.axis in gather.collective.axes:
                self.told.line = index
                self.told.say("error", NO_GRADIENT, gather.where)
        for fault in self.told.faults:
            at_end = fault.line == len(self.record.lines) or not self.record.gradients
            if at_end or fault.line in matter or fault.parameters:
                yield fault
            elif fault.kind == "error":
                yield replace(fault, kind="warning")

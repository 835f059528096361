"""Types what the collectives of a step write on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isclose

from thunder_zero.spmd.collectives import Collective, Pair, effect
from thunder_zero.spmd.laws import Outcome, P, filled, letters
from thunder_zero.spmd.lines import Ref, StepRecord
from thunder_zero.spmd.parts import Parts
from thunder_zero.spmd.storages import TypedStorages


@dataclass(frozen=True)
class Sendings:
    """Args as of ``Walk``. ``summed`` has storages whose values were moved into a sum."""

    record: StepRecord
    axis: str
    values: TypedStorages
    parts: Parts
    batches_differ: bool
    averages_models: bool
    summed: set[int] = field(default_factory=set)

    def of(self, item: Collective, pairs: Sequence[Pair]) -> Iterator[tuple[list[Ref], list[Ref], list[Outcome]]]:
        """Yield what a collective reads, what it writes, and the outcomes, for each pair of its inputs and outputs."""
        for inputs, outputs in pairs:
            if inputs:
                yield inputs, outputs, self._outcomes(item, inputs, outputs)
                if item.op in ("sum", "avg") and self.axis in item.axes:
                    self.summed.update(*({ref.storage} | self.values[ref].parts for ref in inputs))

    def _outcomes(self, item: Collective, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> list[Outcome]:
        size, sources = self.record.axes[self.axis], [self.values[ref] for ref in inputs]
        is_own = self.axis in item.axes and any(source.is_own for source in sources)
        factor = self.values.largest_factor(inputs)
        is_equal = not any(self.parts.codes(ref).any() for ref in inputs)
        is_divided = self.axis in item.axes and is_equal and isclose(factor * size, 1.0)  # before it is sent
        is_share = is_own or is_divided or self._are_equal_shares(inputs)
        codes = [filled(ref.shape, P) if is_share else self.parts.codes(ref).clone() for ref in inputs]
        zero = all(not self.record.values[ref].any() for ref in inputs if ref in self.record.values)
        learned = any(ref.dtype.is_floating_point and self.values[ref].is_learned for ref in inputs)
        if not learned:  # a single number is no slice: a count of this rank's items
            codes = [filled((), P) if not item.dim() and letters(item) == "S" else item for item in codes]
        shapes = [ref.shape for ref in outputs]
        outcomes = effect(item, self.axis, size, codes, shapes, counts=zero or not learned)
        if self.axis in item.axes:
            outcomes = self.parts.made(item.kind, codes, outcomes)
        of_models = is_own and self.averages_models
        of_forward = item.op == "avg" and factor == 1 and any(source.is_mean for source in sources)
        if of_models or of_forward or is_divided:  # a mean is what is wanted
            outcomes = [replace(outcome, factor=outcome.factor * size) for outcome in outcomes]
        return outcomes

    def _are_equal_shares(self, inputs: Sequence[Ref]) -> bool:
        """Return whether equal values are gradients of means over each rank's batch, as a bias has before a mean."""
        is_new = not any(self.values[ref].reductions or self.parts.codes(ref).any() for ref in inputs)
        loss = self.record.loss
        is_new &= loss is None or bool(self.parts.codes(loss).any())  # a loss of all ranks' items has no shares
        return self.batches_differ and is_new and self.values.largest_factor(inputs) == self.record.axes[self.axis]

"""Types what the collectives of a step write on one axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from thunder_zero.spmd.collectives import Collective, Pair, effect
from thunder_zero.spmd.laws import Outcome, P, filled
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
        is_share = is_own or self._are_equal_shares(inputs)
        codes = [filled(ref.shape, P) if is_share else self.parts.codes(ref).clone() for ref in inputs]
        zero = all(not self.record.values[ref].any() for ref in inputs if ref in self.record.values)
        learned = any(ref.dtype.is_floating_point and self.values[ref].is_learned for ref in inputs)
        shapes = [ref.shape for ref in outputs]
        outcomes = effect(item, self.axis, size, codes, shapes, counts=zero or not learned)
        if self.axis in item.axes:
            outcomes = self.parts.made(item.kind, codes, outcomes)
        is_mean = item.op == "avg" and any(source.is_mean for source in sources)
        if is_own or (is_mean and self.values.largest_factor(inputs) == 1):  # a mean of models, or of a forward
            outcomes = [replace(outcome, factor=outcome.factor * size) for outcome in outcomes]
        return outcomes

    def _are_equal_shares(self, inputs: Sequence[Ref]) -> bool:
        """Return whether equal values are gradients of means over each rank's batch, as a bias has before a mean."""
        is_new = not any(self.values[ref].reductions or self.parts.codes(ref).any() for ref in inputs)
        return self.batches_differ and is_new and self.values.largest_factor(inputs) == self.record.axes[self.axis]

"""Values of which each rank reads another part, and the slices that a mesh has so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from thunder_zero.spmd.laws import Outcome, halves, is_sliced
from thunder_zero.spmd.lines import RecordedLine, Ref, Shadow
from thunder_zero.spmd.storages import TypedStorages, cut_dim, gap_dim


@dataclass
class Parts:
    """``over``: codes of inputs of the line that are another part of a value on the neighbour."""

    values: TypedStorages
    over: dict[Ref, Tensor] = field(default_factory=dict)
    _cuts: dict[torch.Size, Tensor] = field(default_factory=dict)  # codes of slices, by shape

    def codes(self, ref: Ref) -> Tensor:
        return self.over[ref] if ref in self.over else self.values.codes(ref)

    def of_rank(self, line: RecordedLine, theirs: Shadow, sized_by_data: set[int]) -> dict[Ref, Tensor]:
        """Return codes of inputs that are another part of an equal value on the neighbouring rank."""
        result: dict[Ref, Tensor] = {}
        for ref, offset in zip(line.inputs, theirs.offsets, strict=False):
            is_sized = ref.storage in sized_by_data
            if offset != ref.offset and ref.nbytes and not self.codes(ref).any() and not is_sized:
                result[ref] = self._cuts[torch.Size(ref.shape)] = halves(ref.shape, gap_dim(ref))
        return result

    def view(self, line: RecordedLine, mine: Shadow, theirs: Shadow, *, is_sized: bool) -> None:
        """Pass codes on to a view; a view of another part on each rank is a slice of its own."""
        source = line.inputs[0]
        for ref in line.results:
            if len(line.results) > 1 or self.values[source].region or is_sized:
                self.values.follow(source, ref)
            elif self.over:
                args, kwargs = tree_map_only(Ref, lambda item: self.codes(item).clone(), (line.args, line.kwargs))
                self.values.separate(ref, line.operator(*args, **kwargs).clone())
            elif theirs.outputs != mine.outputs and (theirs.scalars != mine.scalars or theirs.offsets == mine.offsets):
                codes = self.values[source].view(ref).clone()
                codes = codes if codes.any() else halves(ref.shape, cut_dim(ref.shape, source.shape))
                self.values.separate(ref, codes)
            else:
                self.values.follow(source, ref)

    def made(self, kind: str, codes: Sequence[Tensor], outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return outcomes. Slices that are made by a sum are cut as gathered slices of the same shape are.

        So are slices that an all_to_all gives back: those that it has dealt out before have no elements to exchange.
        """
        is_cut = any(map(is_sliced, codes))
        if kind in ("all_gather", "all_to_all"):
            self._cuts.update((item.shape, item) for item in codes if is_sliced(item))
        if kind != "reduce_scatter" and (kind != "all_to_all" or is_cut):
            return [*outcomes]
        cuts = (self._cuts.get(item.codes.shape) if item.codes.dim() > 1 else None for item in outcomes)
        return [item if cut is None else replace(item, codes=cut) for item, cut in zip(outcomes, cuts, strict=True)]

"""Types what a step reads first: parameters by placements, inputs by comparing with a neighbour's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from thunder_zero.spmd.laws import P, filled, halves
from thunder_zero.spmd.lines import RecordedLine, Ref, Shadow, StepRecord
from thunder_zero.spmd.rules import MOVES
from thunder_zero.spmd.storages import TypedStorages, cut_dim, end_of, gap_dim, is_contiguous
from thunder_zero.spmd.told import Told


class Admitted:
    """Args as of ``Walk``; ``neighbour`` and ``whole`` have the lines that run there, too.

    Attributes:
            cut: storages of parameters that the user cut.
        differ: whether the ranks read different inputs.
    """

    def __init__(
        self,
        record: StepRecord,
        axis: str,
        neighbour: Mapping[int, Shadow],
        whole: StepRecord | None,
        whole_lines: Mapping[int, Shadow],
        values: TypedStorages,
        told: Told,
        *,
        batches_differ: bool,
    ) -> None:
        self._record, self._axis, self._values, self._told = record, axis, values, told
        self._neighbour, self._whole, self._batches_differ = neighbour, whole_lines, batches_differ
        self._full_shapes = {item.path: item.ref.shape for item in whole.parameters} if whole is not None else {}
        self._placed = {item.ref.storage: item for item in (*record.buffers, *record.parameters)}
        self._batch_shapes = set(self._shapes_of_batches()) if batches_differ else set()
        self._pieces = packed(record)
        self._gathered: dict[int, Tensor] = {}  # codes of parameters that FSDP2 gathers, by storage
        self.cut: set[int] = set()
        self.differ = False
        self._place()

    def _place(self) -> None:
        """Type parameters and buffers by their placements."""
        for item in (*self._record.parameters, *self._record.slices):
            self._values[item.ref].is_learned = True
        for item in (*self._placed.values(), *self._record.slices):
            where = item.placements.get(self._axis)
            self._values[item.ref].is_shard = isinstance(where, int)
            if isinstance(where, int):
                self._values.give(item.ref, halves(item.ref.shape, where, item.pieces.get(self._axis, 1)))
            elif where == "partial":
                self._values.give(item.ref, filled(item.ref.shape, P))
            if isinstance(where, int) and item in self._record.slices:
                self._gathered[item.ref.storage] = self._values[item.ref].codes.clone()

    def read(self, line: RecordedLine, index: int) -> None:
        """Type what a line reads first, by comparing it with the neighbour's."""
        here = self._record.shadows[index]
        mine, theirs, whole = (lines.get(index, here).fresh for lines in ({}, self._neighbour, self._whole))
        theirs, whole = (item if len(item) == len(mine) else mine for item in (theirs, whole))
        for ref, value, their_value, (full, _) in zip(line.fresh, mine, theirs, whole, strict=True):
            item, differs = self._placed.get(ref.storage), value != their_value
            self._values[ref].is_total |= item is None and ref.storage in self._record.equalised
            if ref.storage in self._record.equalised or (item is not None and self._axis in item.placements):
                continue
            dim = cut_dim(ref.shape, full if item is None else self._full_shapes.get(item.path, full))
            is_slice = dim is not None and (item is not None or not self._batches_differ)
            if is_slice and item is not None:
                self.cut.add(ref.storage)
                self._values[ref].is_shard = True
            if is_slice or (item is None and (differs or ref.shape in self._batch_shapes)):
                along = (0 if self._batches_differ or item is not None else gap_dim(ref)) if dim is None else dim
                self._values.give(ref, halves(ref.shape, along, self._pieces.get(ref.storage, 1)))
            elif differs and item is not None:
                text = "its values differ between the ranks before the step: broadcast it, or seed the ranks alike"
                self._told.say("error", text, item.path, item.path)
            self.differ |= differs and item is None

    def known(self, line: RecordedLine, ref: Ref, codes: Tensor) -> Tensor:
        """Return the codes of a target. Those of a parameter that FSDP2 gathers are known."""
        gathered = self._gathered.get(ref.storage)
        if gathered is None or line.name not in MOVES or not is_contiguous(ref):
            return codes
        part = gathered[ref.offset : end_of(ref)]
        return torch.cat([part, codes.reshape(-1)[len(part) :]])

    def _shapes_of_batches(self) -> Iterator[tuple[int, ...]]:
        """Yield the shapes of inputs that differ between the ranks: an equal mask of such a shape is cut alike."""
        for index, line in enumerate(self._record.lines):
            mine = self._record.shadows[index].fresh
            theirs = self._neighbour[index].fresh if index in self._neighbour else mine
            for ref, value, their_value in zip(line.fresh, mine, theirs, strict=False):
                if value != their_value and len(ref.shape) > 1 and ref.storage not in self._placed:
                    yield from (ref.shape[:size] for size in range(2, len(ref.shape) + 1))


def packed(record: StepRecord) -> dict[int, int]:
    """Return in how many pieces the products of parameters are split, by storage, as queries, keys and values are."""
    factors: dict[int, list[int]] = {}
    result: dict[int, int] = {}
    for line in record.lines:
        if line.name in ("mm", "addmm", "linear", "bmm"):
            factors.update((ref.storage, [item.storage for item in line.inputs]) for ref in line.results)
        elif line.name.startswith("split") and len({ref.shape for ref in line.results}) == 1 and not line.backward:
            source = line.inputs[0]
            if sum(ref.shape[-1] for ref in line.results) == source.shape[-1]:
                result.update((storage, len(line.results)) for storage in factors.get(source.storage, ()))
    return result

"""Keeps what is known of the values in each storage on one axis: codes, a factor, a cause.

In: refs of a record's lines. Out: codes as tensors of the shapes of the refs, which alias one another as the refs do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isclose, log

import torch
from torch import Tensor

from thunder_zero.spmd.laws import R, V, filled
from thunder_zero.spmd.lines import Ref
from thunder_zero.spmd.regions import Region
from thunder_zero.spmd.verdict import Fault


@dataclass
class TypedStorage:
    """What is known of the values in a storage.

    Attributes:
        width: bytes of an element.
        codes: of the elements, as many as were needed so far.
        factors: by which values differ from the true ones, by the range of bytes written.
        is_mean: whether they follow from a mean over this rank's part.
        is_divided: whether they were divided by the number of ranks.
        is_learned: whether they follow from parameters.
        is_total: whether they follow from a sum over the ranks.
        is_shard: whether they follow from a shard of a parameter.
        is_own: whether they follow from a model that each rank trains for itself, until it is averaged.
        cause: the fault that they follow from: an error that was told, or what is unknown, or the note of a ``V``.
        reductions: of a gradient.
        parts: the storages whose values were moved here.
        region: the lines that made them, from where values decide what is read (``regions.py``).
    """

    width: int = 0
    codes: Tensor = field(default_factory=lambda: filled([1], R))
    factors: dict[tuple[int, int], float] = field(default_factory=dict)
    is_mean: bool = False
    is_divided: bool = False
    is_learned: bool = False
    is_total: bool = False
    is_shard: bool = False
    is_own: bool = False
    parts: frozenset[int] = frozenset()
    cause: Fault | None = None
    reductions: tuple[str, ...] = ()
    region: Region = ()

    def inherit(self, sources: Sequence[TypedStorage], *, sums: bool, is_sent: bool, is_gradient: bool) -> None:
        """Note what follows from the values that a line reads; ``is_sent``: it sends them to the other ranks."""
        self.is_total = sums or any(item.is_total for item in sources)
        self.is_learned = is_gradient or any(item.is_learned for item in sources)
        self.is_shard = not is_sent and any(item.is_shard for item in sources)
        self.is_own = not is_sent and any(item.is_own for item in sources)

    def view(self, ref: Ref) -> Tensor:
        """Return the codes of a tensor in this storage: a view, so that writes are seen by other views."""
        width, need = ref.dtype.itemsize, end_of(ref)
        if self.width > width:
            self.codes = self.codes.repeat_interleave(self.width // width)
        elif 0 < self.width < width:
            self.codes = self.codes[:: width // self.width].clone()
        self.width = width
        if len(self.codes) < need:
            self.codes = torch.cat([self.codes, filled([need - len(self.codes)], R)])
        return self.codes.as_strided(ref.shape, ref.stride, ref.offset)

    @property
    def is_spoiled(self) -> bool:
        """True if faults of these values follow from one that is told already, or from an unknown value."""
        return self.cause is not None and self.cause.kind != "note"


class TypedStorages:
    """The storages of a record, by ref. A view may have a storage of its own."""

    def __init__(self) -> None:
        self._by_number: defaultdict[int, TypedStorage] = defaultdict(TypedStorage)
        self._moved: dict[tuple[object, ...], TypedStorage] = {}

    def own(self, storages: Iterable[int]) -> None:
        """Note that storages have parameters of a model that each rank trains for itself."""
        for number in storages:
            self._by_number[number].is_own = True

    def __getitem__(self, ref: Ref) -> TypedStorage:
        return self._moved.get(ref.place) or self._by_number[ref.storage]

    def codes(self, ref: Ref) -> Tensor:
        """Return the codes of a tensor: a view of those of its storage."""
        return self[ref].view(ref) if ref.nbytes else filled(ref.shape, R)

    def give(self, ref: Ref, codes: Tensor) -> None:
        """Set the codes of a tensor."""
        if ref.nbytes:
            into, codes = self[ref].view(ref), codes.reshape(ref.shape)
            for dim in (dim for dim, step in enumerate(ref.stride) if step == 0):  # expanded: one element for all
                into, codes = into.narrow(dim, 0, 1), codes.narrow(dim, 0, 1)
            into.copy_(codes)

    def follow(self, source: Ref, view: Ref) -> None:
        """Let a view share what is known of its source."""
        if self[source] is not self._by_number[source.storage]:
            self._moved[view.place] = self[source]

    def separate(self, view: Ref, codes: Tensor) -> None:
        """Give a view codes of its own, as the elements beside it belong to other ranks."""
        self._moved[view.place] = TypedStorage()
        self.give(view, codes)

    def spread(self, view: Ref) -> None:
        """Note that each rank wrote to another part of a storage: a parameter there is not equal on all ranks now."""
        base = self._by_number[view.storage]
        if view.place in self._moved and base.is_learned and not base.codes.any():
            base.codes.fill_(V)

    def restore(self, ref: Ref) -> None:
        """Note that a parameter has the numbers again that it had on all ranks."""
        self.give(ref, filled(ref.shape, R))
        self[ref].is_own, self[ref].cause = False, None

    def set_factor(self, ref: Ref, factor: float) -> None:
        """Set the factor of a tensor. What is known of other parts of its storage stays."""
        start, end = place = _place(ref)
        others = self[ref].factors.items()
        rest = {(first, last): item for (first, last), item in others if first < start or last > end}
        self[ref].factors = {**rest, place: 1.0 if isclose(factor, 1.0, rel_tol=1e-9) else factor}

    def largest_factor(self, refs: Iterable[Ref]) -> float:
        """Return the factor that differs most from 1."""
        return max((item for ref in refs for item in self._factors(ref)), key=lambda item: abs(log(item)), default=1.0)

    def _factors(self, ref: Ref) -> Iterator[float]:
        """Yield the factors that a tensor's elements were written with: the last ones."""
        start, end = _place(ref)
        for (first, last), factor in reversed(self[ref].factors.items()):
            if first < end and start < last:
                yield factor
            if first <= start and end <= last:
                return


def end_of(ref: Ref) -> int:
    """Return the position in its storage after a tensor's last element."""
    return ref.offset + sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True)) + 1


def _place(ref: Ref) -> tuple[int, int]:
    return ref.offset * ref.dtype.itemsize, end_of(ref) * ref.dtype.itemsize


def is_contiguous(ref: Ref) -> bool:
    return end_of(ref) - ref.offset == torch.Size(ref.shape).numel() and list(ref.stride) == sorted(ref.stride)[::-1]


def gap_dim(ref: Ref) -> int:
    """Return the dimension along which a tensor is a part of a larger one, as its strides have gaps; 0 if none have."""
    steps = ref.stride
    return next((dim for dim in range(1, len(steps)) if steps[dim - 1] > ref.shape[dim] * steps[dim]), 0)


def cut_dim(shape: Sequence[int], full: Sequence[int]) -> int | None:
    """Return the dimension along which a shape is smaller than the full shape."""
    if len(shape) != len(full):
        return None
    return next((dim for dim, (size, whole) in enumerate(zip(shape, full, strict=True)) if size != whole), None)

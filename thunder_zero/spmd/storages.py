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

from thunder_zero.spmd.laws import R, filled
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
        is_dealt: whether they came by an all_to_all, so that the sum of shares is a slice.
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
    is_dealt: bool = False
    parts: frozenset[int] = frozenset()
    cause: Fault | None = None
    reductions: tuple[str, ...] = ()
    region: Region = ()

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

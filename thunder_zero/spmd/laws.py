"""The laws that a value keeps on an axis, and experiments that recognise them.

An experiment runs an operator on two imagined ranks, with inputs drawn from their types. Each element of an input has a
code. The codes of the output follow from the law that its values keep:

    R         equal on all ranks
    A, B, F   a slice: if an element A of one rank is exchanged with an element B of the other, so are the outputs;
              F is an element of a slice that is never exchanged
    P         a share of a sum: only the sum over ranks is kept
    N         a share of a norm: only the sum of squares is kept
    V         differs between ranks and keeps no law
    X         random numbers that differ between ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

R, A, B, F, P, N, V, X = range(8)
LETTERS = "RSSSPNVX"

Values = Sequence[Tensor]
Rerun = Callable[[Values, int], list[Tensor]]  # runs the operator with these inputs on rank 0 or 1


@dataclass(frozen=True)
class Outcome:
    """The codes of one output, with a fault or with a note on the operator that broke all laws."""

    codes: Tensor
    fault: str = ""
    note: str = ""


def letters(codes: Tensor) -> str:
    """Return the types of codes as text, such as ``"S"`` or ``"P+R"``."""
    return "+".join(sorted({LETTERS[code] for code in codes.unique().tolist()})) or "R"


def filled(shape: Sequence[int], code: int) -> Tensor:
    return torch.full(tuple(shape), code, dtype=torch.uint8)


def halves(shape: Sequence[int], dim: int | None = None) -> Tensor:
    """Return the codes of a slice along a dimension: A in its first half, B in its second half, F in between.

    Without ``dim``, the halves are those of all elements in order.
    """
    if dim is None:
        flat = filled([math.prod(shape)], F)
        half = len(flat) // 2
        flat[:half], flat[half : 2 * half] = A, B
        return flat.reshape(tuple(shape))
    codes = filled(shape, F)
    half = codes.shape[dim] // 2
    codes.narrow(dim, 0, half).fill_(A)
    codes.narrow(dim, half, half).fill_(B)
    return codes


def is_sliced(codes: Tensor) -> bool:
    """Return whether codes have elements to exchange."""
    return bool(((codes == A) | (codes == B)).any())


def _equal(one: Tensor, other: Tensor) -> Tensor:
    one, other = (torch.view_as_real(item) if item.is_complex() else item.double() for item in (one, other))
    return torch.isclose(one, other, rtol=1e-6, atol=1e-9, equal_nan=True)


class Experiment:
    """Runs an operator on two imagined ranks, and recognises the law of each output."""

    def __init__(self, run: Rerun, values: Values, codes: Sequence[Tensor], *, ranked: bool = False) -> None:
        """Draw the inputs of both ranks. ``ranked`` says that the operator itself differs between the ranks."""
        self._run, self._ranked = run, ranked
        self._dice = torch.Generator().manual_seed(1234)
        self.codes = [self._exchangeable(item, codes) for item in codes]
        self.letters = {LETTERS[code] for item in self.codes for code in item.unique().tolist()}
        pairs = [self._draw(value, item) for value, item in zip(values, self.codes, strict=True)]
        self._first, self._second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def outcomes(self, name: str, shapes: Sequence[Sequence[int]], ranks: int) -> list[Outcome]:
        """Return the outcome of each output. ``ranks`` is the axis' number of ranks, for the text of faults."""
        drawn = self._both(self._first, self._second)
        split = self._both(*self._split_otherwise()) if self.letters & {"P", "N"} else drawn
        swapped = self._both(*self._exchanged()) if "S" in self.letters else drawn
        redrawn = self._both(*self._redrawn()) if "V" in self.letters else drawn
        alone = self._run(self._without_shares(), 0)
        return [
            self._recognise(
                name, ranks, shape, drawn[index], split[index], swapped[index], redrawn[index], alone[index]
            )
            for index, shape in enumerate(shapes)
        ]

    def _both(self, first: Values, second: Values) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._run(first, 0), self._run(second, 1), strict=True))

    # inputs

    @staticmethod
    def _exchangeable(codes: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Give random elements the codes of a slice, and a slice as many elements A as B."""
        if bool((codes == X).any()):
            alike = (item for item in others if is_sliced(item) and item.shape == codes.shape)
            codes = torch.where(codes == X, next(alike, halves(codes.shape)), codes)
        uneven = int((codes == A).sum()) != int((codes == B).sum())
        if uneven and codes.numel() > 1 and set(codes.unique().tolist()) <= {A, B, F}:
            return halves(codes.shape)
        return codes

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._dice, dtype=torch.float64)

    def _draw(self, value: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return a value on both ranks. Equal elements keep the recorded value, which decides masks and indices."""
        if not value.is_floating_point():
            return self._draw_integers(value, codes)
        value = value.double()
        unusual = torch.isnan(value) | (value.abs() > 1e30) & (value != -math.inf)
        value = torch.where(unusual, 1.0, value)
        tiny = (value.abs() < 1e-3) & (codes != R)  # too small to tell laws apart
        value = torch.where(tiny, torch.where(value < 0, -0.1, 0.1) * (1 + self._normal(value.shape).abs()), value)
        if bool((value <= 0).all()):  # all alike to a relu
            flips = torch.rand(value.shape, generator=self._dice) < 0.5
            value = torch.where(flips & (codes != R) & value.isfinite(), -value, value)
        order = torch.randperm(value.numel(), generator=self._dice)
        other = value.reshape(-1)[order].reshape(value.shape)
        other = other * (1 + 0.3 * torch.rand(value.shape, generator=self._dice, dtype=torch.float64))
        free = (codes == P) | (codes == N)
        first = torch.where(free, self._normal(value.shape), value)
        return first, torch.where(codes == R, value, torch.where(free, self._normal(value.shape), other))

    def _draw_integers(self, value: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        if value.dtype is torch.bool and bool((codes == V).any()):
            coins = torch.rand(value.shape, generator=self._dice) < 0.5
            return value.clone(), torch.where(codes == V, coins, value)
        flat = value.clone().reshape(-1)
        places = (codes != R).reshape(-1).nonzero()[:, 0]
        flat[places] = flat[places[torch.randperm(len(places), generator=self._dice)]]
        return value.clone(), torch.where(codes == R, value, flat.reshape(value.shape))

    def _split_otherwise(self) -> tuple[list[Tensor], list[Tensor]]:
        """Move shares between the ranks: sums, and sums of squares, stay as they are."""
        first, second = list(self._first), list(self._second)
        cosine, sine = math.cos(0.7), math.sin(0.7)
        for index, codes in enumerate(self.codes):
            if bool((codes == P).any()):
                moved = torch.where(codes == P, self._normal(codes.shape), 0.0)
                first[index], second[index] = first[index] + moved, second[index] - moved
            if bool((codes == N).any()):
                one, other = first[index], second[index]
                first[index] = torch.where(codes == N, cosine * one - sine * other, one)
                second[index] = torch.where(codes == N, sine * one + cosine * other, other)
        return first, second

    def _exchanged(self) -> tuple[list[Tensor], list[Tensor]]:
        """Exchange the elements A of rank 0 with the elements B of rank 1."""
        pairs = [
            exchange(one, other, codes) for one, other, codes in zip(self._first, self._second, self.codes, strict=True)
        ]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _redrawn(self) -> tuple[list[Tensor], list[Tensor]]:
        """Draw the elements that keep no law again."""

        def again(values: Values) -> list[Tensor]:
            return [
                self._draw(value, torch.where(codes == V, V, R))[1] if bool((codes == V).any()) else value
                for value, codes in zip(values, self.codes, strict=True)
            ]

        return again(self._first), again(self._second)

    def _without_shares(self) -> list[Tensor]:
        """Return rank 0's inputs with zeros in place of its shares and slices."""
        return [
            torch.where(codes == R, value, torch.zeros((), dtype=value.dtype))
            if value.is_floating_point() or value.dtype is torch.bool
            else value
            for value, codes in zip(self._first, self.codes, strict=True)
        ]

    # outputs

    def _recognise(
        self,
        name: str,
        ranks: int,
        shape: Sequence[int],
        drawn: tuple[Tensor, Tensor],
        split: tuple[Tensor, Tensor],
        swapped: tuple[Tensor, Tensor],
        redrawn: tuple[Tensor, Tensor],
        alone: Tensor,
    ) -> Outcome:
        """Return the law that an output keeps under all changes of the inputs."""
        runs = [*drawn, *split, *swapped, *redrawn, alone]
        if {item.shape for item in runs} != {torch.Size(shape)}:
            return Outcome(filled(shape, V), note=f"the shape of {name} depends on the data")
        same = _equal(*drawn)
        if same.dim() > len(shape):  # complex numbers
            same = same.all(-1)

        def unchanged(after: tuple[Tensor, Tensor]) -> bool:
            return all(bool(_equal(x, y).all()) for x, y in zip(drawn, after, strict=True))

        by_split, by_swap = not unchanged(split), not unchanged(swapped)
        if bool(same.all()) and not by_split and not by_swap:
            return Outcome(filled(shape, R))
        if not unchanged(redrawn):
            return Outcome(filled(shape, V))
        if by_swap and not by_split:
            for codes in candidates(self.codes, shape):
                after = exchange(*drawn, codes)
                if all(bool(_equal(x, y).all()) for x, y in zip(after, swapped, strict=True)):
                    return Outcome(torch.where((codes == A) | (codes == B), codes, torch.where(same, R, F).byte()))
        if not by_split and not by_swap and (self._ranked or self.letters <= {"R", "S"}):
            return Outcome(torch.where(same, R, V if self._ranked else F).byte())
        return self._sum_or_none(name, ranks, shape, drawn, split, swapped, alone)

    def _sum_or_none(
        self,
        name: str,
        ranks: int,
        shape: Sequence[int],
        drawn: tuple[Tensor, Tensor],
        split: tuple[Tensor, Tensor],
        swapped: tuple[Tensor, Tensor],
        alone: Tensor,
    ) -> Outcome:
        total = drawn[0] + drawn[1]
        if all(bool(_equal(total, x + y).all()) for x, y in (split, swapped)):
            kept = _equal(alone, torch.zeros_like(alone)) | torch.isnan(alone) | _equal(alone, drawn[0])
            added = (
                "a value that is equal on all ranks is added to a share of a sum"
                if "P" in self.letters
                else "every rank adds a value of its own to its share of a sum"
            )
            fault = "" if bool(kept.all()) else f"{name}: {added}: once summed it is counted {ranks} times"
            return Outcome(filled(shape, P), fault)
        squares = [x.square() + y.square() for x, y in (drawn, split, swapped) if not x.is_complex()]
        if squares and all(bool(_equal(squares[0], item).all()) for item in squares):
            return Outcome(filled(shape, N))
        if "P" in self.letters:  # as if it had been summed, so that one fault is told once
            return Outcome(filled(shape, R), _not_linear(name, ranks))
        text = f"{name} does not treat slices alike: its result depends on how the elements are spread over the ranks"
        return Outcome(filled(shape, V), note=text)


def _not_linear(name: str, ranks: int) -> str:
    if "nll_loss" in name:
        return (
            f"{name}: a mean over this rank's own count: the counts of ranks differ, so the mean of their means is not "
            "the mean of the whole"
        )
    return f"{name} is not linear in a share of a sum: the {ranks} shares must be summed first"


def exchange(first: Tensor, second: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange the elements A of the first value with the elements B of the second value, in their order."""
    places_a = (codes == A).reshape(-1).nonzero()[:, 0]
    places_b = (codes == B).reshape(-1).nonzero()[:, 0]
    count = min(len(places_a), len(places_b))
    places_a, places_b = places_a[:count], places_b[:count]
    one, other = first.clone().reshape(-1), second.clone().reshape(-1)
    one[places_a], other[places_b] = second.reshape(-1)[places_b], first.reshape(-1)[places_a]
    return one.reshape(first.shape), other.reshape(second.shape)


def candidates(inputs: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Return the codes that an output may have, from the codes of the inputs and the shape of the output."""
    shape = tuple(shape)
    sliced = [codes for codes in inputs if is_sliced(codes)]
    result = [codes for codes in sliced if codes.shape == shape]
    result += [codes.expand(shape) for codes in sliced if _expands(codes.shape, shape)]
    for codes in sliced:
        result += _along_one_dim(codes, shape)
        if codes.dim() > len(shape):
            result += _reduced(codes, shape)
    result += [halves(shape, dim) for dim, size in enumerate(shape) if size >= 2]
    return [codes for codes in result if 0 < int((codes == A).sum()) == int((codes == B).sum())]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


def _along_one_dim(codes: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the labels of a slice along one dimension, laid along each dimension of the output of this size."""
    result = []
    for dim, size in enumerate(codes.shape):
        lines = codes.movedim(dim, 0).reshape(size, -1)
        if bool((lines == lines[:, :1]).all()):
            for target in (index for index, wanted in enumerate(shape) if wanted == size):
                view = [size if index == target else 1 for index in range(len(shape))]
                result.append(lines[:, 0].reshape(view).expand(tuple(shape)))
    return result


def _reduced(codes: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Drop dimensions along which the labels do not change."""
    for dim in reversed(range(codes.dim())):
        if codes.dim() > len(shape) and bool((codes == codes.narrow(dim, 0, 1)).all()):
            codes = codes.select(dim, 0)
    return [codes] if codes.shape == tuple(shape) else []

"""The laws that a value keeps on an axis, and experiments that recognise them.

An experiment runs an operator on two imagined ranks, with inputs drawn from their types. Each element of an input has a
code. The codes of the output follow from the law that its values keep:

    R         equal on all ranks
    A, B, F   a slice: if an element A of one rank is exchanged with an element B of the other, so are the outputs;
              F is an element of a slice that is never exchanged
    P         a share of a sum: only the sum over ranks is kept
    N         a share of a norm: only the sum of squares is kept
    V         differs between ranks and keeps no law
    X         random numbers that differ between ranks, or a slice that an all_to_all dealt: a slice of any dimension
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

R, A, B, F, P, N, V, X = range(8)
LETTERS = "RSSSPNVX"
OWN_COUNT = (
    "a mean over this rank's own count: the counts of ranks differ, so the mean of their means is not the mean of the "
    "whole"
)
COUNTS = ("histc", "bincount")  # counts of a rank's own elements: zeros are elements, too

Values = list[Tensor]
Pair = tuple[Tensor, Tensor]  # a value on both imagined ranks
Rerun = Callable[[Values, int], Values]  # runs the operator with these inputs on rank 0 or 1


@dataclass(frozen=True)
class Outcome:
    """What is known of one output of a line, and what is said of it.

    Attributes:
        codes: of its elements.
        text: what is said.
        kind: that of a fault, or ``"note"``: said where a value without a law does harm; or ``"assumed"``.
        factor: by which the line changes the factor of its inputs.
    """

    codes: Tensor
    text: str = ""
    kind: str = "error"
    factor: float = 1.0

    @property
    def is_error(self) -> bool:
        return bool(self.text) and self.kind == "error"


def letters(codes: Tensor) -> str:
    """Return the types of codes as text, such as ``"S"`` or ``"P+R"``."""
    return "+".join(sorted({LETTERS[code] for code in codes.unique().tolist()})) or "R"


def filled(shape: Sequence[int], code: int) -> Tensor:
    return torch.full(tuple(shape), code, dtype=torch.uint8)


def halves(shape: Sequence[int], dim: int | None = None, pieces: int = 1) -> Tensor:
    """Return the codes of a slice along a dimension: A in its first half, B in its second half, F in between.

    Without ``dim``, or if it has one element only, the halves are those of all elements in order. A slice that consists
    of equal ``pieces``, as of a gate's and an up projection's weight, has halves in each piece.
    """
    if dim is not None and pieces > 1 and shape[dim] % pieces == 0:
        piece = [size // pieces if index == dim else size for index, size in enumerate(shape)]
        return torch.cat([halves(piece, dim)] * pieces, dim)
    codes = filled(shape, F)
    by_elements = dim is None or dim >= codes.dim() or codes.shape[dim] < 2
    rows = codes.reshape(-1) if by_elements else codes.movedim(dim or 0, 0)
    half = len(rows) // 2
    rows[:half], rows[half : 2 * half] = A, B
    return codes


def is_sliced(codes: Tensor) -> bool:
    """Return whether codes have elements to exchange."""
    return bool(((codes == A) | (codes == B)).any())


def has(codes: Tensor, code: int) -> bool:
    return bool((codes == code).any())


def _equal(one: Tensor, other: Tensor) -> Tensor:
    one, other = (torch.view_as_real(item) if item.is_complex() else item.double() for item in (one, other))
    return torch.isclose(one, other, rtol=1e-8, atol=1e-9, equal_nan=True)


def _all_equal(pair: Pair, other: Pair) -> bool:
    return all(bool(_equal(x, y).all()) for x, y in zip(pair, other, strict=True))


def _norm(one: Tensor, other: Tensor) -> Tensor:
    return torch.hypot(one.double(), other.double())


@dataclass(frozen=True)
class ChangedRuns:
    """One output on both ranks, under each change of the inputs."""

    drawn: Pair
    split: Pair  # shares are split otherwise between the ranks
    swapped: Pair  # elements of slices are exchanged
    redrawn: Pair  # elements that keep no law are drawn again
    alone: Tensor  # on rank 0, with zeros in place of its shares and slices

    @property
    def shapes(self) -> set[torch.Size]:
        return {item.shape for item in (*self.drawn, *self.split, *self.swapped, *self.redrawn, self.alone)}

    def keeps(self, total: Callable[[Tensor, Tensor], Tensor]) -> bool:
        """Return whether a total over the ranks is the same under all changes."""
        totals = [total(*pair) for pair in (self.drawn, self.split, self.swapped)]
        return all(bool(_equal(totals[0], item).all()) for item in totals)

    @property
    def adds_own_value(self) -> bool:
        """True if a rank without shares and slices still adds a value to the sum."""
        kept = _equal(self.alone, torch.zeros_like(self.alone)) | self.alone.isnan() | _equal(self.alone, self.drawn[0])
        return not bool(kept.all())


class Experiment:
    """Runs an operator on two imagined ranks, and recognises the law of each output.

    Args:
        name: the operator, for the text of faults.
        ranks: the axis' number of ranks, for the text of faults.
        run: runs the operator.
        values, codes: its recorded inputs, and their codes.
        ranked: whether the operator itself differs between the ranks.
        counts: whether it sums over its own elements, each of which adds something, even a zero.
        seed: of the drawn values.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        run: Rerun,
        values: Values,
        codes: Sequence[Tensor],
        *,
        ranked: bool = False,
        counts: bool = False,
        seed: int = 0,
    ) -> None:
        self._name, self._ranks, self._run, self._ranked = name, ranks, run, ranked
        self._counts = counts or name in COUNTS
        self._dice = torch.Generator().manual_seed(1234 + seed)
        self._codes = [_exchangeable(item) for item in codes]
        self._letters = {LETTERS[code] for item in self._codes for code in item.unique().tolist()}
        self._inputs = [self._draw(value, item) for value, item in zip(values, self._codes, strict=True)]

    def outcomes(self, shapes: Sequence[Sequence[int]]) -> list[Outcome]:
        """Return the outcome of each output."""
        drawn = self._outputs()
        split = self._outputs(self._split_otherwise) if self._letters & {"P", "N"} else drawn
        swapped = self._outputs(exchange) if "S" in self._letters else drawn
        redrawn = self._outputs(self._redraw) if "V" in self._letters else drawn
        zeros = [_without_shares(first, codes) for (first, _), codes in zip(self._inputs, self._codes, strict=True)]
        runs = zip(drawn, split, swapped, redrawn, self._run(zeros, 0), strict=True)
        return [self._recognise(shape, ChangedRuns(*run)) for shape, run in zip(shapes, runs, strict=True)]

    def _outputs(self, change: Callable[[Pair, Tensor], Pair] | None = None) -> list[Pair]:
        """Run the operator on both ranks, with changed inputs."""
        pairs = self._inputs
        if change is not None:
            pairs = [change(pair, codes) for pair, codes in zip(pairs, self._codes, strict=True)]
        first, second = (self._run([pair[rank] for pair in pairs], rank) for rank in (0, 1))
        return list(zip(first, second, strict=True))

    # inputs

    def _normal(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=self._dice, dtype=torch.float64)

    def _draw(self, value: Tensor, codes: Tensor) -> Pair:
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
        other = other * (1.05 + 0.3 * torch.rand(value.shape, generator=self._dice, dtype=torch.float64))
        free = (codes == P) | (codes == N)
        first = torch.where(free, self._normal(value.shape), value)
        return first, torch.where(codes == R, value, torch.where(free, self._normal(value.shape), other))

    def _draw_integers(self, value: Tensor, codes: Tensor) -> Pair:
        if value.dtype is torch.bool and has(codes, V):
            coins = torch.rand(value.shape, generator=self._dice) < 0.5
            return value.clone(), torch.where(codes == V, coins, value)
        flat = value.clone().reshape(-1)
        places = (codes != R).reshape(-1).nonzero()[:, 0]
        flat[places] = flat[places[torch.randperm(len(places), generator=self._dice)]]
        return value.clone(), torch.where(codes == R, value, flat.reshape(value.shape))

    def _split_otherwise(self, pair: Pair, codes: Tensor) -> Pair:
        """Move shares between the ranks: sums, and sums of squares, stay as they are."""
        first, second = pair
        if has(codes, P):
            moved = torch.where(codes == P, self._normal(codes.shape), 0.0)
            first, second = first + moved, second - moved
        if has(codes, N):
            cosine, sine = math.cos(0.7), math.sin(0.7)
            turned = cosine * first - sine * second, sine * first + cosine * second
            first, second = torch.where(codes == N, turned[0], first), torch.where(codes == N, turned[1], second)
        return first, second

    def _redraw(self, pair: Pair, codes: Tensor) -> Pair:
        """Draw the elements that keep no law again."""
        if not has(codes, V):
            return pair
        free = torch.where(codes == V, V, R)
        return self._draw(pair[0], free)[1], self._draw(pair[1], free)[1]

    # outputs

    def _recognise(self, shape: Sequence[int], runs: ChangedRuns) -> Outcome:
        """Return the law that an output keeps under all changes of the inputs."""
        if runs.shapes != {torch.Size(shape)}:
            return Outcome(filled(shape, V), f"the shape of {self._name} depends on the data", "unknown")
        same = _equal(*runs.drawn)
        if same.dim() > len(shape):  # complex numbers
            same = same.all(-1)
        by_split, by_swap = not _all_equal(runs.drawn, runs.split), not _all_equal(runs.drawn, runs.swapped)
        if bool(same.all()) and not by_split and not by_swap:
            return Outcome(filled(shape, R))
        if not _all_equal(runs.drawn, runs.redrawn):
            return Outcome(filled(shape, V))
        if not by_split:
            for codes in candidates(self._codes, shape):
                if _all_equal(exchange(runs.drawn, codes), runs.swapped):
                    return Outcome(torch.where((codes == A) | (codes == B), codes, torch.where(same, R, F).byte()))
        if not by_split and not by_swap and (self._ranked or self._letters <= {"R", "S"}):
            return Outcome(torch.where(same, R, V if self._ranked else F).byte())
        return self._sum_or_none(shape, runs)

    def _sum_or_none(self, shape: Sequence[int], runs: ChangedRuns) -> Outcome:
        name, ranks, has_shares = self._name, self._ranks, bool(self._letters & {"P", "N"})
        if runs.keeps(torch.add):
            added = (
                "a value that is equal on all ranks is added to a share of a sum"
                if has_shares
                else "every rank adds a value of its own to its share of a sum"
            )
            fault = (
                f"{name}: {added}: once summed it is counted {ranks} times"
                if runs.adds_own_value and not self._counts
                else ""
            )
            return Outcome(filled(shape, P), fault)
        if not runs.drawn[0].is_complex() and runs.keeps(_norm):
            return Outcome(filled(shape, N))
        if has_shares and runs.drawn[0].is_floating_point():  # as if it had been summed, so that one fault is told once
            if "nll_loss" in name:
                return Outcome(filled(shape, R), f"{name}: {OWN_COUNT}")
            text = f"{name} is not linear in a share of a sum: the {ranks} shares must be summed first"
            return Outcome(filled(shape, R), text)
        text = f"{name} does not treat slices alike: its result depends on how the elements are spread over the ranks"
        return Outcome(filled(shape, V), text, "note")


def as_slices(inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield codes in which random elements are slices: as another input, or along each dimension in turn."""
    choices = []
    for codes in inputs:
        alike = [item for item in inputs if is_sliced(item) and item.shape == codes.shape]
        along = [halves(codes.shape, dim) for dim, size in enumerate(codes.shape) if size >= 2]
        slices = alike[:1] or along or [halves(codes.shape)]
        choices.append([torch.where(codes == X, item, codes) for item in slices] if has(codes, X) else [codes])
    yield from map(list, product(*choices))


def _exchangeable(codes: Tensor) -> Tensor:
    """Give a slice as many elements A as B: rows, as a shard of a parameter has, where a reduction cut elements."""
    is_uneven = int((codes == A).sum()) != int((codes == B).sum())
    by_elements = is_uneven or bool((codes == halves(codes.shape)).all())
    is_slice = codes.numel() > 1 and set(codes.unique().tolist()) <= {A, B, F}
    return halves(codes.shape, 0) if by_elements and is_slice else codes


def _without_shares(value: Tensor, codes: Tensor) -> Tensor:
    """Return a value with zeros in place of shares and slices."""
    if value.is_floating_point() or value.dtype is torch.bool:
        return torch.where(codes == R, value, torch.zeros((), dtype=value.dtype))
    return value


def exchange(pair: Pair, codes: Tensor) -> Pair:
    """Exchange the elements A of the first value with the elements B of the second value, in their order."""
    places_a, places_b = ((codes == code).reshape(-1).nonzero()[:, 0] for code in (A, B))
    count = min(len(places_a), len(places_b))
    places_a, places_b = places_a[:count], places_b[:count]
    first, second = (item.clone().reshape(-1) for item in pair)
    first[places_a], second[places_b] = pair[1].reshape(-1)[places_b], pair[0].reshape(-1)[places_a]
    return first.reshape(pair[0].shape), second.reshape(pair[1].shape)


def candidates(inputs: Sequence[Tensor], shape: Sequence[int]) -> list[Tensor]:
    """Return the codes that an output may have: those of an input, expanded or laid along one of its dimensions."""
    sliced = [codes for codes in inputs if is_sliced(codes)]
    result = [codes.expand(tuple(shape)) for codes in sliced if _expands(codes.shape, shape)]
    result += [laid for codes in sliced for laid in _along_one_dim(codes, shape)]
    result += [halves(shape, dim) for dim, size in enumerate(shape) if size > 1]
    return [codes for codes in result if 0 < int((codes == A).sum()) == int((codes == B).sum())]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


def _along_one_dim(codes: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the labels of a slice along one dimension, laid along each dimension of the output of this size."""
    result = []
    for dim, size in enumerate(codes.shape):
        lines = codes.movedim(dim, 0).reshape(size, -1)
        labels = lines.amax(1)
        if bool(((lines == labels[:, None]) | (lines == R)).all()):
            for target in (index for index, wanted in enumerate(shape) if wanted == size):
                view = [size if index == target else 1 for index in range(len(shape))]
                result.append(labels.reshape(view).expand(tuple(shape)))
    return result

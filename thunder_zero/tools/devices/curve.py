"""Seconds by size, as measured: a line from point to point, and beyond the last one at its rate."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite


@dataclass(frozen=True, slots=True)
class Curve:
    """How long work of a size takes.

    A size below the first takes as long as the first; between two sizes the time is on the line that joins them; beyond
    the last it is in proportion to the last.

    Attributes:
        points: sizes and seconds, sizes ascending, seconds not descending.

    Raises:
        ValueError: no points, a size or a time that is no number or below 0, or sizes and times out of order.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        numbers = [number for point in self.points for number in point]
        if not numbers or not all(isfinite(number) and number >= 0 for number in numbers):
            raise ValueError(f"a curve has the points {self.points}; give sizes and seconds, each a number from 0")
        if any(later[0] <= one[0] or later[1] < one[1] for one, later in pairwise(self.points)):
            raise ValueError(f"a curve has the points {self.points}; give ascending sizes that take no less time")

    @staticmethod
    def measured(points: Iterable[tuple[float, float]]) -> Curve:
        """Of measured points: noise that makes a larger size faster than a smaller one is cut off."""
        sizes, seconds = zip(*sorted(points), strict=True)
        return Curve(tuple(zip(sizes, accumulate(seconds, max), strict=True)))

    def seconds(self, size: float) -> float:
        """How long work of this size takes."""
        at = bisect_left(self.points, size, key=lambda point: point[0])
        if at == 0:
            return self.points[0][1]
        if at == len(self.points):
            return size * self.seconds_per_unit if self.points[-1][0] else self.points[-1][1]
        (left, before), (right, after) = self.points[at - 1 : at + 1]
        return before + (after - before) * (size - left) / (right - left)

    @property
    def seconds_per_unit(self) -> float:
        """Of the last size."""
        size, seconds = self.points[-1]
        return seconds / size if size else 0.0

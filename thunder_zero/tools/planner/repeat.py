"""Repeats what is alike: finds a period in a sequence of signs, and where further periods belong.

A model of n alike blocks is traced, and the model has more. Where two periods of a half in a row have the same signs,
the halves of larger models have more of them there::

    signs    a b | c d e | c d e | c d f g
    marks          ^       ^                     where blocks begin to compute
    longer   a b | c d e | c d e | c d e | c d f g
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Stretch:
    """A period, and where it repeats.

    Attributes:
        start: the first position that is equal to the one a period later.
        period: positions of a block.
    """

    start: int
    period: int

    @property
    def end(self) -> int:
        """The position where further periods go: behind the first."""
        return self.start + self.period


def stretch_of(signs: Sequence[Hashable], marks: Sequence[int]) -> Stretch | None:
    """A period that occurs at least twice in a row, where the distance of two marks in a row is the period.

    Args:
        signs: what makes positions equal.
        marks: where each of the alike blocks begins, ascending; None is found with fewer than two.
    """
    found = [_around(signs, first, second - first) for first, second in pairwise(marks)]
    return next((stretch for stretch in found if stretch is not None), None)


def _around(signs: Sequence[Hashable], at: int, period: int) -> Stretch | None:
    """The longest run around a position, in which all are equal to those a period later."""
    if period <= 0 or signs[at] != signs[at + period]:
        return None
    start = stop = at
    while start and signs[start - 1] == signs[start - 1 + period]:
        start -= 1
    while stop + period < len(signs) and signs[stop] == signs[stop + period]:
        stop += 1
    return Stretch(start, period) if stop - start >= period else None


def positions(length: int, stretch: Stretch | None, copies: int) -> list[int]:
    """For each position of the longer sequence, the one that it has its sign from."""
    if stretch is None or not copies:
        return list(range(length))
    middle = list(range(stretch.start, stretch.end)) * copies
    return [*range(stretch.end), *middle, *range(stretch.end, length)]


def linked(at: int, source: int, link: int, stretch: Stretch | None, copies: int) -> int:
    """Where an earlier position that another refers to is in the longer sequence.

    Args:
        at: the position that refers, in the longer sequence.
        source: where it has its sign from.
        link: what that position refers to.
        stretch, copies: as for :func:`positions`.
    """
    if stretch is not None and copies and source >= stretch.end and link < stretch.start:
        return link
    return at - (source - link)

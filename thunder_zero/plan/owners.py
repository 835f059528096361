"""Assigns each parameter to an owner, and to a bucket of parameters that are sent together.

The result is equal on every rank, since it depends only on shapes and world size::

    work 9 8 7 | 3 3 1      two buckets of three parameters, two ranks
    rank 0: 9               rank 1: 8 7   (largest first, each to the rank with the least work in the bucket)
    rank 0: 3 3             rank 1: 1     (among equal ranks, to the rank with the least work in all buckets)

``Policy.owned`` names parameters whose owner is planned. ``tz.whole`` assigns the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Piece:
    number: int  # the index among the optimizer's parameters
    work: int
    nbytes: int
    kind: Hashable = None  # a bucket has pieces of one kind
    owner: int | None = None  # None if it is to be assigned


def work_of_shape(shape: tuple[int, ...]) -> int:
    """Return the work of stepping a parameter: its elements times the smaller side of its matrix, as for Muon."""
    elements = prod(shape)
    return elements * max(1, min(shape[0], elements // shape[0])) if len(shape) > 1 and elements else elements


def assign(pieces: Sequence[Piece], ranks: int, bucket_bytes: int, loads: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Group pieces into buckets, in sending order, and assign an owner: lists of (number of a piece, rank) pairs.

    A bucket holds pieces of similar work, so that its owners finish together. It has at most ``bucket_bytes``, or the
    size of its first piece times the number of ranks if that is more.
    """
    totals, buckets = list(loads), list[list[tuple[int, int]]]()
    for members in _fill_buckets(pieces, ranks, bucket_bytes):
        works = [0] * ranks  # the work of each rank in this bucket
        buckets.append([])
        for piece in members:
            owner = piece.owner
            if owner is None:
                owner = min(range(ranks), key=lambda rank: (works[rank], totals[rank], rank))
            works[owner] += piece.work
            totals[owner] += piece.work
            buckets[-1].append((piece.number, owner))
    return buckets


def _fill_buckets(pieces: Sequence[Piece], ranks: int, bucket_bytes: int) -> list[list[Piece]]:
    buckets: list[list[Piece]] = []
    for kind in dict.fromkeys(piece.kind for piece in sorted(pieces, key=lambda piece: piece.number)):
        room = -1
        pieces_of_kind = (piece for piece in pieces if piece.kind == kind)
        for piece in sorted(pieces_of_kind, key=lambda piece: (-piece.work, piece.number)):
            if piece.nbytes > room:
                room = max(bucket_bytes, ranks * piece.nbytes)
                buckets.append([])
            room -= piece.nbytes
            buckets[-1].append(piece)
    return buckets

"""Gives each parameter an owner, and a place in a bucket that travels together. Frozen data.

The result is equal on every rank, since it depends only on shapes and world size::

    work 9 8 7 | 3 3 1      two buckets of three parameters, two ranks
    rank 0: 9               rank 1: 8 7   (largest first, each to the rank with the least work in the bucket)
    rank 0: 3 3             rank 1: 1     (among equal ranks, to the rank with the least work in all buckets)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor

from thunder_zero.plan.params import Param


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter to be stepped whole."""

    number: int  # its index among the optimizer's parameters
    work: int  # what its owner does in a step, in any unit that all pieces share
    nbytes: int  # of the whole parameter
    kind: Hashable = None  # pieces of different kinds (dtypes) do not travel together


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together."""

    numbers: tuple[int, ...]  # of the pieces, the most work first
    owners: tuple[int, ...]  # for each piece, the rank that steps it


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a bucket."""

    param: Param
    shard: Tensor  # this rank's part of it, and the key of its states
    group: int
    name: str | None  # in the group, if the group has names
    owner: int  # the rank that steps it, among the ranks that share a copy of the model


@dataclass(frozen=True, eq=False)
class ParamAndGrad:
    """A whole parameter and its gradient, if it has one, on the device where shards rest."""

    param: Tensor
    grad: Tensor | None


def work_of_shape(shape: tuple[int, ...]) -> int:
    """Return the work of stepping a parameter: its elements times the smaller side of its matrix.

    This is the work of an optimizer that multiplies matrices, such as one that orthogonalizes. All dimensions but the
    first count as one side. It also balances an optimizer that only passes over the elements, if most matrices have
    the same smaller side, as the width of a model is.
    """
    elements = prod(shape)
    return elements * max(1, min(shape[0], elements // shape[0])) if len(shape) > 1 and elements else elements


def assign(pieces: Sequence[Piece], ranks: int, bucket_bytes: int, before: Sequence[int] = ()) -> tuple[Bucket, ...]:
    """Put pieces into buckets, in the order in which they travel, and give each piece an owner.

    A bucket holds pieces of similar work, so that its owners finish together. The pieces are sorted by work. A bucket
    takes as many as fit into ``bucket_bytes``, or into the size of its first piece times the number of ranks. Within a
    bucket the largest piece goes first, to the rank with the least work in the bucket, then in all buckets.

    Args:
        before: the work that each rank has already.
    """
    totals = list(before or [0] * ranks)
    buckets = []
    for members in _fill_buckets(pieces, ranks, bucket_bytes):
        here = [0] * ranks
        owners = []
        for piece in members:
            owner = min(range(ranks), key=lambda rank: (here[rank], totals[rank], rank))
            here[owner] += piece.work
            totals[owner] += piece.work
            owners.append(owner)
        buckets.append(Bucket(tuple(piece.number for piece in members), tuple(owners)))
    return tuple(buckets)


def _fill_buckets(pieces: Sequence[Piece], ranks: int, bucket_bytes: int) -> list[list[Piece]]:
    buckets: list[list[Piece]] = []
    for kind in dict.fromkeys(piece.kind for piece in sorted(pieces, key=lambda piece: piece.number)):
        room = -1
        alike = (piece for piece in pieces if piece.kind == kind)
        for piece in sorted(alike, key=lambda piece: (-piece.work, piece.number)):
            if piece.nbytes > room:
                room = max(bucket_bytes, ranks * piece.nbytes)
                buckets.append([])
            room -= piece.nbytes
            buckets[-1].append(piece)
    return buckets

"""Gives each parameter an owner, and a place in a bucket that travels together. Frozen data.

The same on every rank, since it depends on shapes and world size only::

    work 9 8 7 | 3 3 1      two buckets of three parameters, two ranks
    rank 0: 9               rank 1: 8 7   (largest first, each to the rank with the least work in the bucket)
    rank 0: 3 3             rank 1: 1     (of equal ranks, the one with the least work of all)
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

    number: int  # its place among the optimizer's parameters
    work: int  # what its owner does in a step, in units that are the same for all pieces
    nbytes: int  # of the whole parameter
    kind: Hashable = None  # pieces of different kinds (dtypes) do not travel together


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that travel together."""

    numbers: tuple[int, ...]  # of the pieces, the most work first
    owners: tuple[int, ...]  # for each, the rank that steps it


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a bucket."""

    param: Param
    shard: Tensor  # what the model has of it, and the key of its states
    group: int
    name: str | None  # in the group, if the group has names
    owner: int  # the rank of the copy of the model that steps it


@dataclass(frozen=True, eq=False)
class Values:
    """A whole parameter and its gradient, if it has one, on the device where shards rest."""

    param: Tensor
    grad: Tensor | None


def work_of_shape(shape: tuple[int, ...]) -> int:
    """The work of an optimizer that multiplies matrices of the gradient's sides, as orthogonalising does: the elements
    times the smaller side. Other dimensions than the first count as one side. It balances an optimizer that passes over
    the elements as well, where matrices have one smaller side, a model's width."""
    elements = prod(shape)
    return elements * max(1, min(shape[0], elements // shape[0])) if len(shape) > 1 and elements else elements


def assign(pieces: Sequence[Piece], ranks: int, bucket_bytes: int, before: Sequence[int] = ()) -> tuple[Bucket, ...]:
    """Put pieces into buckets, in the order in which they travel, and give each an owner; ``before`` is the work that
    each rank has already.

    A bucket holds pieces of similar work, so that its owners finish together: the pieces are sorted by work, and a
    bucket takes as many as fit into ``bucket_bytes``, or into the size of its first one for each rank. Within a bucket
    the largest piece goes first, to the rank with the least work in the bucket, then with the least of all.
    """
    totals = list(before or [0] * ranks)
    buckets = []
    for members in _cut(pieces, ranks, bucket_bytes):
        here = [0] * ranks
        owners = []
        for piece in members:
            owner = min(range(ranks), key=lambda rank: (here[rank], totals[rank], rank))
            here[owner] += piece.work
            totals[owner] += piece.work
            owners.append(owner)
        buckets.append(Bucket(tuple(piece.number for piece in members), tuple(owners)))
    return tuple(buckets)


def _cut(pieces: Sequence[Piece], ranks: int, bucket_bytes: int) -> list[list[Piece]]:
    buckets: list[list[Piece]] = []
    for kind in dict.fromkeys(piece.kind for piece in sorted(pieces, key=lambda one: one.number)):
        room = -1
        for piece in sorted((one for one in pieces if one.kind == kind), key=lambda one: (-one.work, one.number)):
            if piece.nbytes > room:
                room = max(bucket_bytes, ranks * piece.nbytes)
                buckets.append([])
            room -= piece.nbytes
            buckets[-1].append(piece)
    return buckets

"""A step to draw: what each line of a record computes, sends, allocates and frees, without values.

Tools draw it (``tools/table/recorded.py``). It needs no torch, as the process that starts a check has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DrawnLine:
    """A line of a picture.

    Attributes:
        code: its statement; values are named by their storages.
        where: the user's line.
        unit: the block whose module computes.
        backward: whether a backward ran.
        reads, writes: storages.
        flops: of products, attention and convolutions.
        traffic_bytes: that it reads and writes.
        dtype: of the first floating-point value that it reads.
        types: of what it writes, such as ``"dp:S tp:P"``.
        collective: what it launches, such as ``"all_gather"``; "" if it is no collective.
        axes, ranks: of the collective's group.
        sent: bytes that this rank sends in it, on a ring.
    """

    code: str
    where: str
    unit: str
    backward: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: int
    traffic_bytes: int
    dtype: str
    types: str
    collective: str = ""
    axes: tuple[str, ...] = ()
    ranks: int = 1
    sent: int = 0


@dataclass(frozen=True)
class StepPicture:
    """A step on one rank.

    Attributes:
        axes: the axes of the mesh and their numbers of ranks.
        data: the axes whose ranks have batches of their own.
        lines: the operators that ran, but for views.
        sizes: changes of storages, as (index of the line, storage, bytes from then on); the index -1 is before the
            step.
        parameters, gradients: storages and elements on this rank, keyed by path.
        buffers: storages, keyed by path.
    """

    axes: Mapping[str, int]
    data: tuple[str, ...]
    lines: tuple[DrawnLine, ...]
    sizes: tuple[tuple[int, int, int], ...]
    parameters: Mapping[str, tuple[int, int]]
    gradients: Mapping[str, tuple[int, int]]
    buffers: Mapping[str, tuple[int, int]]

"""A parameter on a mesh: its shapes, its rows, the axes that reduce its gradient. Frozen data.

Only this file defines the meaning of an axis for a parameter; ``layout.py`` has the arithmetic. A sharded and a
replicated parameter on ``Mesh.of(4, rank=2)`` have these shapes::

    Geometry((5, 3), mesh, is_cut=True)     in compute (5, 3)   at rest (2, 3): row 4 and one row of padding
    Geometry((5, 3), mesh, is_cut=False)    in compute (5, 3)   at rest (5, 3) on every rank

Torch's tensor parallelism first slices a parameter along any dimension. ZeRO then shards the rows of the slice. On
``Mesh.of(2, rank=1, slices=2)`` parameters have these shapes::

    Geometry((6, 4), mesh, is_cut=True, sliced=0)     in compute (3, 4)   at rest (2, 4): the slice's row 2, and padding
    Geometry((6, 4), mesh, is_cut=True, sliced=1)     in compute (6, 2)   at rest (3, 2)
    Geometry((6, 4), mesh, is_cut=True)               in compute (6, 4)   at rest (3, 4), equal along tensor

Each geometry has its own mesh, since the parameters of one model may have different axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from thunder_zero.plan import layout
from thunder_zero.plan.mesh import ALL, REPLICATE, SHARD, TENSOR, Mesh


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes and rows of one parameter on a mesh."""

    shape: tuple[int, ...]  # the global shape
    mesh: Mesh  # the axes of the ranks that hold the parameter
    is_cut: bool  # True if each rank along ``shard`` stores a part of the rows, padded; False if each stores all rows
    # the dimension that is sliced along the axis ``tensor``; None if the parameter is not sliced
    sliced: int | None = None
    is_partial: bool = False  # True if the gradient is a sum, and each rank along ``tensor`` computes one term

    @property
    def in_compute(self) -> tuple[int, ...]:
        """The shape that compute reads: this rank's slice, gathered over the data axes."""
        if self.sliced is None:
            return self.shape
        start, stop = self.part
        return (*self.shape[: self.sliced], stop - start, *self.shape[self.sliced + 1 :])

    @property
    def part(self) -> tuple[int, int]:
        """The half-open range of this rank's slice along :attr:`sliced`. The last slices may be smaller."""
        return self._parts[self.mesh.tensor.place]

    @property
    def uneven(self) -> tuple[int, ...]:
        """The sizes of all ranks' slices along :attr:`sliced` if these differ, else empty."""
        sizes = () if self.sliced is None else tuple(stop - start for start, stop in self._parts)
        return sizes if len(set(sizes)) > 1 else ()

    @property
    def _parts(self) -> list[tuple[int, int]]:
        assert self.sliced is not None, "only a sliced parameter has parts"
        size, ranks = self.shape[self.sliced], self.mesh.tensor.size
        return [layout.row_range(size, ranks, rank) for rank in range(ranks)]

    @property
    def at_rest(self) -> tuple[int, ...]:
        """The shape that each rank stores, padding included."""
        return layout.shard_shape(self.in_compute, self.mesh.shard.size) if self.is_cut else self.in_compute

    @property
    def gathered(self) -> tuple[int, ...]:
        """The shape of the concatenated shards of all ranks: :attr:`in_compute` with rows of padding at its end."""
        return layout.padded_shape(self.in_compute, self.mesh.shard.size) if self.is_cut else self.in_compute

    @property
    def rows(self) -> slice:
        """The real (unpadded) rows that this rank owns; all rows if the parameter is not sharded."""
        return self.rows_of(self.mesh.shard.place)

    def rows_of(self, place: int) -> slice:
        """Return the real rows of the rank with index ``place`` along the axis ``shard``."""
        return slice(*layout.row_range(self.in_compute[0], self.mesh.shard.size, place)) if self.is_cut else slice(None)

    @property
    def stored_rows(self) -> slice:
        """The rows of :attr:`gathered` that this rank stores."""
        shard = self.mesh.shard
        return slice(*layout.stored_range(self.in_compute[0], shard.size, shard.place)) if self.is_cut else slice(None)

    @property
    def padding(self) -> int:
        """The number of rows of padding at the end of this rank's shard."""
        shard = self.mesh.shard
        return layout.padding_rows(self.in_compute[0], shard.size, shard.place) if self.is_cut else 0

    @property
    def numel(self) -> int:
        """The number of real elements that this rank owns."""
        return self.numel_of(self.mesh.shard.place)

    def numel_of(self, place: int) -> int:
        """Return the number of real elements that the rank with index ``place`` along ``shard`` owns."""
        return (
            layout.owned_numel(self.in_compute, self.mesh.shard.size, place) if self.is_cut else prod(self.in_compute)
        )

    @property
    def is_spread(self) -> bool:
        """True if other ranks own rows, too, so that a gather communicates."""
        return self.is_cut and self.mesh.shard.size > 1

    @property
    def reduced_over(self) -> tuple[str, ...]:
        """The axes of the collectives that reduce the gradient, in order. The first collective scatters the rows of a
        sharded parameter's gradient. Collectives over data axes average; collectives over ``tensor`` sum."""
        summed = (TENSOR,) if self.is_partial and self.mesh.tensor.size > 1 else ()
        if self.mesh.replicate.size == 1:
            return (SHARD, *summed)
        return (SHARD, REPLICATE, *summed) if self.is_cut else (ALL, *summed)


def cut_rows(shape: tuple[int, ...], mesh: Mesh) -> Geometry:
    """Return the geometry of a tensor: sharded by rows, or replicated if the tensor is 0-dim or empty."""
    return Geometry(tuple(shape), mesh, layout.is_sharded(tuple(shape)))

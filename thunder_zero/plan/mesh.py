"""The mesh of ranks that train a model: named axes, each with this rank's index. Frozen data.

::

    Mesh.of(world_size=2, replicas=3)    shard  0  1
                             replicate 0        0  1
                                       1        2  3     Mesh.place() of each rank
                                       2        4  5

Rows are sharded and gathered along ``shard``. Ranks along ``replicate``, one in each replica, hold equal rows. Along
these two data axes, each rank has its own batch. Ranks along ``tensor`` have the same batch. There each rank computes
with its slice of a parameter (torch's tensor parallelism, ``parallelize_module``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from thunder_zero.plan.policy import is_count

SHARD, REPLICATE, TENSOR = "shard", "replicate", "tensor"
ALL = "all"  # shard and replicate, in one collective
OF_MEANS = (REPLICATE, TENSOR)  # axes of reductions that read the mean of an earlier reduction
DATA = (REPLICATE, SHARD)  # axes along which batches differ, and gradients are averaged; the slowest first


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a mesh."""

    name: str  # :data:`SHARD`, :data:`REPLICATE` or :data:`TENSOR`
    size: int  # the number of ranks along the axis
    place: int  # this rank's index along the axis

    @property
    def peers(self) -> tuple[int, ...]:
        """The indices of the other ranks along the axis."""
        return tuple(place for place in range(self.size) if place != self.place)


@dataclass(frozen=True)
class Mesh:
    """The ranks that train a model, with this rank's index along each axis."""

    axes: tuple[Axis, ...]  # the dimensions of the mesh, the slowest first
    # names of the process groups along ``tensor``, as torch's collectives use them. Empty for a mesh without process
    # groups: all of torch's collectives then count as tensor-parallel
    slice_groups: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    @staticmethod
    def of(
        world_size: int, rank: int = 0, replicas: int = 1, *, copy: int = 0, slices: int | None = None, part: int = 0
    ) -> Mesh:
        """Return a mesh with both data axes, and with ``tensor`` if ``slices`` is given.

        ``rank``, ``copy`` and ``part`` are this rank's indices along ``shard``, ``replicate`` and ``tensor``.
        """
        if not (is_count(world_size) and world_size):
            raise ValueError(f"world_size is {world_size!r}; give the number of ranks, at least 1")
        if not (is_count(rank) and rank < world_size):
            raise ValueError(f"rank is {rank!r}; with world_size={world_size} it must be 0 to {world_size - 1}")
        if not (is_count(replicas) and replicas):
            raise ValueError(f"replicas is {replicas!r}; give the number of copies of the sharded model, at least 1")
        data = (Axis(REPLICATE, replicas, copy), Axis(SHARD, world_size, rank))
        return Mesh(data if slices is None else (*data, Axis(TENSOR, slices, part)))

    def __str__(self) -> str:
        """Format this rank's index along ``shard``, such as ``rank 1 of 2``, and its slice if the model is sliced."""
        slices = f" of slice {self.tensor.place} of {self.tensor.size}" if self.is_sliced else ""
        return f"rank {self.shard.place} of {self.shard.size}{slices}"

    def _axis(self, name: str) -> Axis:
        return next((axis for axis in self.axes if axis.name == name), Axis(name, 1, 0))

    @cached_property
    def shard(self) -> Axis:
        """The ranks that share a replica: each owns some rows."""
        return self._axis(SHARD)

    @cached_property
    def replicate(self) -> Axis:
        """The ranks that own the same rows, one rank in each replica."""
        return self._axis(REPLICATE)

    @cached_property
    def tensor(self) -> Axis:
        """The ranks that compute with slices of the same parameters and with the same batch."""
        return self._axis(TENSOR)

    @property
    def is_sliced(self) -> bool:
        """True if torch's tensor parallelism slices the model."""
        return any(axis.name == TENSOR for axis in self.axes)

    def joins_slices(self, group: object) -> bool:
        """Return whether the process group with this name (in torch's collectives) joins the ranks along ``tensor``."""
        return not self.slice_groups or group in self.slice_groups

    def require_unsliced(self, what: str, instead: str) -> None:
        """Raise RuntimeError if torch's tensor parallelism slices the model."""
        if self.is_sliced:
            raise RuntimeError(f"{what} knows no slices of torch's tensor parallelism yet; {instead}")

    def over(self, name: str) -> Axis:
        """Return the axis with this name. :data:`ALL` names an axis that joins both data axes."""
        if name not in (ALL, *DATA, TENSOR):
            raise ValueError(f"no mesh has an axis {name!r}; name one of {', '.join((ALL, *DATA, TENSOR))}")
        return Axis(ALL, self.batches, self.place(DATA)) if name == ALL else self._axis(name)

    @cached_property
    def batches(self) -> int:
        """The number of different batches. The mean gradient is the sum over ranks divided by this number."""
        return self.size(DATA)

    def size(self, axes: Iterable[str] | None = None) -> int:
        """Return the number of ranks along the given axes together (default: all axes)."""
        return prod(axis.size for axis in self._select(axes))

    def place(self, axes: Iterable[str] | None = None) -> int:
        """Return this rank's index among the ranks along the given axes (default: all axes)."""
        index = 0
        for axis in self._select(axes):
            index = index * axis.size + axis.place
        return index

    def _select(self, axes: Iterable[str] | None) -> Iterable[Axis]:
        return self.axes if axes is None else map(self._axis, axes)

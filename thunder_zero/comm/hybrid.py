"""Hybrid sharding: several copies of a model, each sharded over some of the ranks.

Rows are gathered inside a copy. A gradient is reduce-scattered inside the copy, and its rows are then averaged over
the ranks of the other copies that hold the same rows (Zhao et al., PyTorch FSDP, 2023, section 3.2.2)::

    ranks 0 1 | 2 3     reduce_scatter  0-1, 2-3        all_reduce of the rows  0-2, 1-3

Gradients of replicated parameters are averaged over all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.transport import Between, Forwarding, Shape, Transport, outside_autograd
from thunder_zero.plan import layout

Started = tuple[Sequence[Tensor], Waitable]  # means inside a copy; the handle that averages them over copies


class Hybrid(Forwarding):
    """The transport of a model of several copies, each on ``world_size`` ranks, of which this is number ``rank``."""

    def __init__(self, shard: Transport, replicate: Transport, world: Transport, world_size: int, rank: int) -> None:
        super().__init__(shard)
        self._replicate, self._world, self._place = replicate, world, (world_size, rank)
        self._pending: set[Callable[[], Started]] = set()  # what nobody has waited for
        self.averages = shard.averages & replicate.averages & world.averages

    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather inside the copy."""
        return self._inner.all_gather(shards, shapes, into)

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Waitable:
        """Average inside the copy and then, in the background, this rank's rows over all copies."""
        reduced = self._inner.reduce_scatter(grads)
        padding = [layout.padding_rows(grad.shape[0], *self._place) for grad in grads]

        def average() -> Started:
            means = reduced.wait()
            rows = [mean[: len(mean) - count] for mean, count in zip(means, padding, strict=True)]
            return means, self._replicate.all_reduce(rows)

        started = self._replicate.run_after(average)
        self._pending.add(started)

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            self._pending.discard(started)
            means, averaged = started()
            return tuple(_with_padding(mean, rows) for mean, rows in zip(means, averaged.wait(), strict=True))

        return WaitsBy(wait)

    def reduce_scatter_then(self, grads: Sequence[Tensor], between: Between) -> Waitable:
        reduced = self._inner.reduce_scatter(grads)

        def average() -> Started:
            return between(reduced.wait(), self._replicate), WaitsBy(tuple)

        # In the thread of the averages above: messages under a tag leave in one order on all ranks.
        started = self._replicate.run_after(average)
        self._pending.add(started)

        def wait() -> tuple[Tensor, ...]:
            self._pending.discard(started)
            means, _ = started()
            return tuple(means)

        return WaitsBy(wait)

    def all_reduce(self, grads: Sequence[Tensor]) -> Waitable:
        """Average over all ranks."""
        return self._world.all_reduce(grads)

    def with_tag(self, tag: int) -> Hybrid:
        other = copy(self)
        other._inner, other._replicate = self._inner.with_tag(tag), self._replicate.with_tag(tag)
        other._world = self._world.with_tag(tag)
        return other

    @property
    def in_flight(self) -> bool:
        parts = (self._inner, self._replicate, self._world)
        return bool(self._pending) or any(transport.in_flight for transport in parts)

    def drain(self) -> None:
        while self._pending:
            _, averaged = self._pending.pop()()
            averaged.wait()
        for transport in (self._inner, self._replicate, self._world):
            transport.drain()


def _with_padding(mean: Tensor, rows: Tensor) -> Tensor:
    """Return the rows averaged over copies, with the padding of the mean inside of a copy."""
    if rows.shape == mean.shape:
        return rows  # not copied into the mean, which may be the gradient itself
    mean[: len(rows)].copy_(rows)
    return mean

"""Hybrid sharding: several copies of a model, each sharded over some of the ranks.

Rows are gathered inside a copy. A gradient is reduce-scattered inside the copy, and its rows are then averaged over
the ranks of the other copies that hold the same rows (Zhao et al., PyTorch FSDP, 2023, section 3.2.2)::

    ranks 0 1 | 2 3     reduce_scatter  0-1, 2-3        all_reduce of the rows  0-2, 1-3

Gradients of replicated parameters are averaged over all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import torch
from torch import Tensor

from thunder_zero.comm.handle import Result, Waitable
from thunder_zero.comm.transport import PeerBuffers, Transport
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import real_rows


class Hybrid:
    """The transport of a model of several copies. See :class:`thunder_zero.comm.transport.Transport`."""

    def __init__(self, shard: Transport, replicate: Transport, world: Transport, plan: Plan) -> None:
        self._shard, self._replicate, self._world = shard, replicate, world
        self._plan = plan
        self._pending: set[Averaged] = set()
        self.averages = shard.averages & replicate.averages & world.averages

    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather inside the copy."""
        return self._shard.all_gather(shards, params, into)

    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average inside the copy and then, in the background, this rank's rows over all copies."""
        reduced = self._shard.reduce_scatter(grads, params)

        def average() -> tuple[Sequence[Tensor], Waitable]:
            means = reduced.wait()
            rows = [real_rows(mean, param, self._plan) for mean, param in zip(means, params, strict=True)]
            return means, self._replicate.all_reduce(rows, params)

        return Averaged(self._replicate.run_after(average), params, self._plan, self._pending)

    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average over all ranks."""
        return self._world.all_reduce(grads, params)

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Waitable:
        """Trade inside the copy."""
        return self._shard.trade(outgoing, incoming)

    def run_after(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """As the transport inside the copy does."""
        return self._shard.run_after(start)

    def with_tag(self, tag: int) -> Hybrid:
        """See :meth:`thunder_zero.comm.transport.Transport.with_tag`."""
        other = copy(self)
        other._shard, other._replicate = self._shard.with_tag(tag), self._replicate.with_tag(tag)
        other._world = self._world.with_tag(tag)
        return other

    @property
    def in_flight(self) -> bool:
        """See :attr:`thunder_zero.comm.transport.Transport.in_flight`."""
        parts = (self._shard, self._replicate, self._world)
        return bool(self._pending) or any(transport.in_flight for transport in parts)

    def drain(self) -> None:
        """See :meth:`thunder_zero.comm.transport.Transport.drain`."""
        while self._pending:
            next(iter(self._pending)).wait()
        for transport in (self._shard, self._replicate, self._world):
            transport.drain()


Started = tuple[Sequence[Tensor], Waitable]  # means inside a copy; the handle that averages them over copies


class Averaged:
    """The handle of gradients that are averaged inside a copy, then over the copies."""

    def __init__(
        self, started: Callable[[], Started], params: Sequence[Param], plan: Plan, pending: set[Averaged]
    ) -> None:
        self._started, self._params, self._plan = started, params, plan
        self._pending = pending
        pending.add(self)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self) -> tuple[Tensor, ...]:
        """This rank's rows of the means over all ranks, padded."""
        self._pending.discard(self)
        means, handle = self._started()
        results = []
        for mean, rows, param in zip(means, handle.wait(), self._params, strict=True):
            if rows.shape == mean.shape:
                results.append(rows)  # not copied into the mean, which may be the gradient itself
            else:
                real_rows(mean, param, self._plan).copy_(rows)
                results.append(mean)
        return tuple(results)

"""Mixed precision on the wire: what travels has the dtypes of the plan, what rests and steps has its own.

The cast comes before the gather, so that only shards are cast, and a cast copy lives no longer than its bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thunder_zero.plan import Param, Plan
from thunder_zero.runtime.handle import Waitable
from thunder_zero.runtime.resident import own_rows_of
from thunder_zero.runtime.transport import Transport


class Casting:
    """A transport that casts in front of another one. See :class:`thunder_zero.runtime.transport.Transport`."""

    def __init__(self, inner: Transport, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    def neighbours(self, params: Sequence[Param]) -> list[list[Param]]:
        """Those that are not cast: casting copies a shard anyway."""
        return self._inner.neighbours([param for param in params if param.compute_dtype is param.dtype])

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather in the dtype of compute; own rows of ``into`` are written, too."""
        if into is None:
            cast = [shard.detach().to(param.compute_dtype) for shard, param in zip(shards, params, strict=True)]
            return self._inner.all_gather(cast, params)
        own = [own_rows_of(buffer, self._plan) for buffer in into]
        for rows, shard in zip(own, shards, strict=True):
            if rows.dtype is not shard.dtype:
                rows.copy_(shard.detach())
        return self._inner.all_gather(own, params, into=into)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average in ``reduce_dtype``; the means have the shards' dtypes."""
        return CastBack(self._inner.reduce_scatter(_to_travel(grads, params), params), params)

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average in ``reduce_dtype``; the means have the parameters' dtypes."""
        return CastBack(self._inner.all_reduce(_to_travel(grads, params), params), params)

    def drain(self) -> None:
        """See :meth:`thunder_zero.runtime.transport.Transport.drain`."""
        self._inner.drain()


class CastBack:
    """The handle of means that are cast to the dtypes at rest once they are there."""

    def __init__(self, handle: Waitable, params: Sequence[Param]) -> None:
        self._handle = handle
        self._params = params

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self) -> tuple[Tensor, ...]:
        """The means."""
        return tuple(mean.to(param.dtype) for mean, param in zip(self._handle.wait(), self._params, strict=True))


def _to_travel(grads: Sequence[Tensor], params: Sequence[Param]) -> list[Tensor]:
    return [grad.detach().to(param.reduce_dtype) for grad, param in zip(grads, params, strict=True)]


def casts(plan: Plan) -> bool:
    """Whether anything of the plan travels in another dtype than it has."""
    return any(not param.dtype is param.compute_dtype is param.reduce_dtype for param in plan.params)

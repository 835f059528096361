"""Transports over the backend's own collectives: one launch a bucket on NCCL.

The tensors travel without copies. Only a gradient whose number of rows is not divisible by the number of ranks is
copied, into a buffer with zeros at its end, since these collectives send chunks of equal size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Private in name; it is how torch itself groups calls (batch_isend_irecv), and there is no public way.
from torch.distributed.distributed_c10d import _coalescing_manager

from thunder_zero import layout
from thunder_zero.comm.handle import BucketPart, Handle, Result, drain
from thunder_zero.comm.transport import FLOATS
from thunder_zero.plan import Param
from thunder_zero.rows import rows_in

# torch 2.13 renamed both, and warns under the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Native:
    """Buffers, padding and handles, which both transports share."""

    averages = FLOATS  # NCCL and MPI have no sum of complex numbers
    _op: dist.ReduceOp.RedOpType

    def __init__(self, group: ProcessGroup, role: int = 0) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._pending: set[Handle] = set()

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Handle:
        """See :meth:`thunder_zero.comm.transport.Transport.all_gather`."""
        if into is None:
            own = [shard.detach() for shard in shards]
            shapes = [layout.padded_shape(param.shape, self._world_size) for param in params]
            fulls = [shard.new_empty(shape) for shard, shape in zip(shards, shapes, strict=True)]
        else:
            fulls = [full.detach() for full in into]
            own = [self._own_rows(full, param) for full, param in zip(fulls, params, strict=True)]
        parts = self._launch(_all_gather_single, [(full, rows, {}) for full, rows in zip(fulls, own, strict=True)])
        unpadded = tuple(full[: param.shape[0]] for full, param in zip(fulls, params, strict=True))
        return Handle(parts, unpadded, self._pending)

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        """See :meth:`thunder_zero.comm.transport.Transport.reduce_scatter`."""
        padded_shapes = [layout.padded_shape(param.shape, self._world_size) for param in params]
        shares = [self._share(grad.detach(), shape) for grad, shape in zip(grads, padded_shapes, strict=True)]
        shapes = [layout.shard_shape(param.shape, self._world_size, self._rank) for param in params]
        means = tuple(grad.new_empty(shape) for grad, shape in zip(grads, shapes, strict=True))
        options = {"op": self._op}
        calls = [(mean, share, options) for mean, share in zip(means, shares, strict=True)]
        return Handle(self._launch(_reduce_scatter_single, calls), means, self._pending)

    @torch.inference_mode(False)
    @torch.no_grad()
    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        """See :meth:`thunder_zero.comm.transport.Transport.all_reduce`."""
        # Copied: the collective works in place, and other operations may still read the gradient.
        means = tuple(grad.new_empty(grad.shape) for grad in grads)
        for mean, grad in zip(means, grads, strict=True):
            self._write_share(mean, grad)
        parts = self._launch(dist.all_reduce, [(mean, {"op": self._op}) for mean in means])
        return Handle(parts, means, self._pending)

    def soon(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Run it when its result is waited for; see :meth:`thunder_zero.comm.transport.Transport.soon`."""
        return start

    def under(self, key: int) -> Self:
        """Collectives have no tags; see :meth:`thunder_zero.comm.transport.Transport.under`."""
        return self

    @property
    def in_flight(self) -> bool:
        """See :attr:`thunder_zero.comm.transport.Transport.in_flight`."""
        return bool(self._pending)

    def drain(self) -> None:
        """See :meth:`thunder_zero.comm.transport.Transport.drain`."""
        drain(self._pending)

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        """Start ``collective(*tensors, **options)`` for each ``(*tensors, options)``."""
        raise NotImplementedError

    def _share(self, grad: Tensor, padded_shape: tuple[int, ...]) -> Tensor:
        """This rank's contiguous input of the reduction, padded with zero rows."""
        share = grad.new_empty(padded_shape)
        self._write_share(share[: grad.shape[0]], grad)
        share[grad.shape[0] :].zero_()
        return share

    def _write_share(self, out: Tensor, grad: Tensor) -> None:
        """Write this rank's input into ``out``; ``_op`` over all ranks' inputs gives the mean."""
        raise NotImplementedError

    def _own_rows(self, full: Tensor, param: Param) -> Tensor:
        return rows_in(full, param, self._world_size, self._rank)


class Grouped(_Native):
    """NCCL: one launch for all calls of a bucket; the collective itself takes the mean.

    ``wait`` makes the current stream wait for the collectives, not the host.
    """

    _op = dist.ReduceOp.AVG

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        with _coalescing_manager(self._group, async_ops=True) as launched:
            for *tensors, options in calls:
                collective(*tensors, group=self._group, **options)
        return [BucketPart((launched.wait,), _keep_alive(calls))]

    def _share(self, grad: Tensor, padded_shape: tuple[int, ...]) -> Tensor:
        return grad.contiguous() if grad.shape == padded_shape else super()._share(grad, padded_shape)

    def _write_share(self, out: Tensor, grad: Tensor) -> None:
        out.copy_(grad)


class OneByOne(_Native):
    """Any backend: one collective for each tensor, and a sum of gradients that are divided first.

    Dividing first keeps float16 from overflowing if the mean does not, as NCCL's average does.
    """

    _op = dist.ReduceOp.SUM

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        works = [collective(*tensors, group=self._group, async_op=True, **options) for *tensors, options in calls]
        return [BucketPart(tuple(work.wait for work in works), _keep_alive(calls))]

    def _write_share(self, out: Tensor, grad: Tensor) -> None:
        torch.div(grad, self._world_size, out=out)

    def _own_rows(self, full: Tensor, param: Param) -> Tensor:
        return super()._own_rows(full, param).clone()  # MPI forbids an input that lies inside the output


def _keep_alive(tensors: object) -> Callable[[], object]:
    """A function that holds ``tensors`` until it is called and dropped."""
    return lambda: tensors

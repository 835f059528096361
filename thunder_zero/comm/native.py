"""Implements transports with the backend's own collectives: one launch per bucket on NCCL.

The collectives send chunks of equal size, so a gradient is copied and padded with zeros if the number of ranks does not
divide its rows. Nothing else is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_single, reduce_scatter_single

from thunder_zero.comm.handle import BucketPart, Handle
from thunder_zero.comm.transport import FLOATS, PeerBuffers, Shape, Transport, outside_autograd
from thunder_zero.compat.private import foreach_div_
from thunder_zero.compat.torch.groups import one_launch
from thunder_zero.plan import layout


class _Native(Transport):
    averages = FLOATS  # NCCL and MPI have no sum of complex numbers
    means: frozenset[torch.dtype] = frozenset()  # dtypes for which the collective itself averages

    def __init__(self, group: ProcessGroup, role: int = 0) -> None:
        super().__init__()
        self._group = group
        self.world_size = group.size()
        self.rank = group.rank()

    @outside_autograd
    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Handle:
        if into is None:
            rows_here = [shard.detach() for shard in shards]
            padded = [layout.padded_shape(shape, self.world_size) for shape in shapes]
            fulls = [shard.new_empty(shape) for shard, shape in zip(shards, padded, strict=True)]
        else:
            fulls = [full.detach() for full in into]
            rows_here = [self._rows_here(full, shape[0]) for full, shape in zip(fulls, shapes, strict=True)]
        calls: list[tuple[Any, ...]] = [
            (_sendable(full), _sendable(rows), {}) for full, rows in zip(fulls, rows_here, strict=True)
        ]
        parts = self._launch(all_gather_single, calls)
        unpadded = tuple(full[: shape[0]] for full, shape in zip(fulls, shapes, strict=True))
        return Handle(parts, unpadded, self._pending)

    @outside_autograd
    def reduce_scatter(self, grads: Sequence[Tensor]) -> Handle:
        padded_shapes = [layout.padded_shape(grad.shape, self.world_size) for grad in grads]
        inputs = [self._input(grad.detach(), shape) for grad, shape in zip(grads, padded_shapes, strict=True)]
        shapes = [layout.shard_shape(grad.shape, self.world_size) for grad in grads]
        means = tuple(grad.new_empty(shape) for grad, shape in zip(grads, shapes, strict=True))
        options = self._options(means)
        calls = [(mean, grad, options) for mean, grad in zip(means, inputs, strict=True)]
        return Handle([*self._launch(reduce_scatter_single, calls), self._division(means)], means, self._pending)

    @outside_autograd
    def all_reduce(self, grads: Sequence[Tensor]) -> Handle:
        # Copied: the collective works in place, and other operations may still read the gradient.
        means = tuple(grad.new_empty(grad.shape) for grad in grads)
        for mean, grad in zip(means, grads, strict=True):
            self._write_input(mean, grad)
        parts = self._launch(dist.all_reduce, [(mean, self._options(means)) for mean in means])
        return Handle([*parts, self._division(means)], means, self._pending)

    @outside_autograd
    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Handle:
        return Handle(self._start_messages(outgoing, incoming), (), self._pending)

    def _start_messages(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> list[BucketPart]:
        directions = ((dist.isend, outgoing), (dist.irecv, incoming))
        ops = [
            dist.P2POp(operation, _sendable(tensor), group=self._group, group_peer=rank)
            for operation, buffers in directions
            for rank, tensors in buffers.items()
            for tensor in tensors
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(ops) if ops else []
        return [BucketPart(tuple(work.wait for work in works), keep_alive(ops))]

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        """Start ``collective(*tensors, **options)`` for each ``(*tensors, options)``."""
        raise NotImplementedError

    def _options(self, means: Sequence[Tensor]) -> dict[str, Any]:
        return {"op": dist.ReduceOp.AVG if means[0].dtype in self.means else dist.ReduceOp.SUM}

    def _divisors(self, dtype: torch.dtype) -> tuple[float, float]:
        if dtype in self.means:
            return 1, 1
        return float16_divisors(self.world_size) if dtype is torch.float16 else (self.world_size, 1)

    def _division(self, means: tuple[Tensor, ...]) -> BucketPart:
        _, after = self._divisors(means[0].dtype)
        return BucketPart((), None if after == 1 else lambda: foreach_div_(means, after))

    def _input(self, grad: Tensor, padded_shape: tuple[int, ...]) -> Tensor:
        """Return this rank's contiguous input of the reduction, padded with zero rows; a copy only if needed."""
        if grad.shape == padded_shape and grad.is_contiguous() and self._divisors(grad.dtype)[0] == 1:
            return grad
        padded = grad.new_empty(padded_shape)
        self._write_input(padded[: grad.shape[0]], grad)
        padded[grad.shape[0] :].zero_()
        return padded

    def _write_input(self, out: Tensor, grad: Tensor) -> None:
        before, _ = self._divisors(grad.dtype)
        if before == 1:
            out.copy_(grad)
        else:
            torch.div(grad, before, out=out)

    def _rows_here(self, full: Tensor, rows: int) -> Tensor:
        start, stop = layout.stored_range(rows, self.world_size, self.rank)
        return full[start:stop]


class CoalescedNccl(_Native):
    """The transport for NCCL: one launch for all calls of a bucket. ``wait`` blocks the current stream, not the host.

    NCCL averages by dividing by W before the sum, which loses small float16 numbers, so this class divides them.
    """

    means = FLOATS - {torch.float16}

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        with one_launch(self._group) as launched:
            for *tensors, options in calls:
                collective(*tensors, group=self._group, **options)
        return [BucketPart((launched.wait,), keep_alive(calls))]


class PerTensor(_Native):
    """The transport for other backends: one collective for each tensor. Gradients are divided before the sum."""

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        works = [collective(*tensors, group=self._group, async_op=True, **options) for *tensors, options in calls]
        return [BucketPart(tuple(work.wait for work in works), keep_alive(calls))]

    def _rows_here(self, full: Tensor, rows: int) -> Tensor:
        return super()._rows_here(full, rows).clone()  # MPI forbids an input that lies inside the output


def float16_divisors(world_size: int) -> tuple[float, float]:
    """Return the divisors of float16 gradients before and after the sum, as in FSDP2: W before it could lose small
    gradients, W after it could overflow.

    >>> float16_divisors(8)
    (4, 2.0)
    """
    before = 1
    while world_size % before == 0 and world_size / before > before:
        before *= 2
    return before, world_size / before


def _sendable(tensor: Tensor) -> Tensor:
    """Return the tensor, or its bytes if a backend does not send its dtype: NCCL has no int16, for example."""
    return tensor if tensor.dtype in FLOATS else tensor.view(torch.uint8)


def keep_alive(tensors: object) -> Callable[[], object]:
    """Return a no-op that keeps ``tensors`` alive until the no-op is dropped."""
    return lambda: tensors

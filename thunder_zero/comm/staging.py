"""Casts (mixed precision) and copies to and from host memory, in front of another transport.

Shards are cast and copied before the gather, so that only shards are, and a copy lives only while its bytes travel;
gradients after the reduction. On CUDA, shards in host memory are pinned, and casts run on the device, since a copy
that also casts makes the host wait; the copies run in the stream of compute. ``HostCopies`` knows when they have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thunder_zero.comm.handle import Waitable, WaitsBy
from thunder_zero.comm.transport import Forwarding, Transport, outside_autograd
from thunder_zero.plan.params import Param, Plan
from thunder_zero.plan.rows import rows_in


class HostCopies:
    """The copies of one model's offloaded shards, which run in the stream of compute while the host goes on; those to a
    GPU alone are asynchronous. If no shard rests in host memory, the host never waits."""

    def __init__(self, device: torch.device, *, offloaded: bool) -> None:
        self._device = device
        self._are_asynchronous = offloaded and device.type == "cuda"
        self._last: torch.cuda.Event | None = None  # in the stream after the last copy

    def note(self) -> None:
        """Copies were started."""
        if self._are_asynchronous:
            self._last = torch.cuda.Event()
            self._last.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Make the host wait for all copies; not for the compute after them."""
        if self._last is not None:
            self._last.synchronize()
            self._last = None


HOST = torch.device("cpu")


def rest_device(param: Param, plan: Plan, device: torch.device) -> torch.device:
    """The device of a parameter's shard, gradient and optimizer state; replicated parameters are never offloaded."""
    return HOST if plan.rests_on_host(param) else device


def is_staged(param: Param, plan: Plan, device: torch.device) -> bool:
    """Whether a cast or copy of the shard is gathered instead of the shard itself."""
    return param.is_cast or rest_device(param, plan, device) != device


def needs_staging(plan: Plan, device: torch.device) -> bool:
    """Whether any parameter or gradient is cast or copied."""
    return any(is_staged(param, plan, device) or param.reduce_dtype is not param.dtype for param in plan.params)


class Staging(Forwarding):
    """A transport that casts and copies in front of another; what is traded is on the device of compute already."""

    def __init__(self, inner: Transport, plan: Plan, device: torch.device, copies: HostCopies) -> None:
        super().__init__(inner)
        self._copies = copies
        self._plan = plan
        self._device = device

    @outside_autograd
    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather in the dtype and on the device of compute; this rank's rows of ``into`` are written, too."""
        if into is None:
            staged = [
                self._on_device(shard, param).to(param.compute_dtype)
                for shard, param in zip(shards, params, strict=True)
            ]
            self._copies.note()
            return self._inner.all_gather(staged, params)
        own = [
            rows_in(buffer, param, self._plan.world_size, self._plan.rank)
            for buffer, param in zip(into, params, strict=True)
        ]
        for rows, shard, param in zip(own, shards, params, strict=True):
            if is_staged(param, self._plan, self._device):
                rows.copy_(self._on_device(shard, param))
        self._copies.note()
        return self._inner.all_gather(own, params, into=into)

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().to(self._device, non_blocking=True)

    @outside_autograd
    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average; the means have the dtypes and devices of the shards."""
        return self._put_back(self._inner.reduce_scatter(grads, params), params)

    @outside_autograd
    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average; the means have the parameters' dtypes."""
        return self._put_back(self._inner.all_reduce(grads, params), params)

    def with_tag(self, tag: int) -> Staging:
        return Staging(self._inner.with_tag(tag), self._plan, self._device, self._copies)

    def _put_back(self, handle: Waitable, params: Sequence[Param]) -> Waitable:
        """The handle of means that are cast and copied to the dtypes and devices of the shards. A copy to host memory
        may still run when it has been waited for: ``Calls.wait_offloaded`` waits for all of them."""
        places = [(rest_device(param, self._plan, self._device), param.dtype) for param in params]

        @outside_autograd
        def wait() -> tuple[Tensor, ...]:
            means = zip(handle.wait(), places, strict=True)
            return tuple(mean.to(dtype).to(device, non_blocking=True) for mean, (device, dtype) in means)

        return WaitsBy(wait)

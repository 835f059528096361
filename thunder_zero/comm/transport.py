"""How a bucket's collective is carried out: one protocol, and the table of who does it on which backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thunder_zero.comm.handle import Handle, Result, Waitable
from thunder_zero.comm.native import Grouped, Plain
from thunder_zero.comm.pairwise import Exchange
from thunder_zero.plan import Param

__all__ = ["BACKENDS", "Alone", "Handle", "Transport", "Waitable", "transport_for"]


class Transport(Protocol):
    """Launches the collectives of one bucket at a time; all tensors of a bucket share a dtype.

    Every rank launches the same buckets in the same order, from one thread. Inputs must not change
    until the handle's ``wait``.
    """

    def neighbours(self, params: Sequence[Param]) -> list[list[Param]]:
        """Which of these sharded parameters' shards travel without a copy if they lie side by side in memory.

        Each list is one such memory, of one dtype, in its order; most parameters are in none.
        """

    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather sharded parameters.

        Args:
            shards: contiguous, each ``layout.shard_shape(param.shape, W)``.
            params: what travels.
            into: buffers of ``layout.padded_shape(param.shape, W)`` whose own rows are the shards
                already; the other rows are filled.

        Returns:
            A handle of the full, unpadded, contiguous parameters (views of ``into``, if given).
        """

    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average gradients of sharded parameters over ranks.

        Args:
            grads: each ``param.shape``, contiguous or not.
            params: whose gradients they are.

        Returns:
            A handle of this rank's rows of the means, ``layout.shard_shape(param.shape, W)``, padding zero.
        """

    def all_reduce(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Waitable:
        """Average gradients of replicated parameters over ranks.

        Returns:
            A handle of the means, equal on all ranks, in tensors that are new (for W > 1).
        """

    def soon(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Run ``start``, which waits for something and launches more on this transport, without anybody waiting.

        Returns:
            What waits for its result. Where a backend's streams order what is launched, ``start`` runs only then.
        """

    def drain(self) -> None:
        """End all that a failed step left under way. Every rank must have failed at the same point of the step."""


class Alone:
    """A world of one rank: nothing travels."""

    def __init__(self) -> None:
        self._pending: set[Handle] = set()

    def neighbours(self, params: Sequence[Param]) -> list[list[Param]]:
        """Nothing travels."""
        return []

    def all_gather(
        self, shards: Sequence[Tensor], params: Sequence[Param], into: Sequence[Tensor] | None = None
    ) -> Handle:
        """The shards are the parameters: one rank's rows are all rows."""
        fulls = tuple(shard.detach() for shard in (shards if into is None else into))
        return Handle((), fulls, self._pending)

    def reduce_scatter(self, grads: Sequence[Tensor], params: Sequence[Param]) -> Handle:
        """The mean over one rank is the gradient itself."""
        means = tuple(grad.contiguous() for grad in grads)
        return Handle((), means, self._pending)

    all_reduce = reduce_scatter

    def soon(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Nothing travels, so there is no hurry."""
        return start

    def drain(self) -> None:
        """Nothing is ever under way."""
        self._pending.clear()


# (device type, backend) -> who carries the bucket
BACKENDS: Mapping[tuple[str, str], Callable[[ProcessGroup, int], Transport]] = {
    ("cpu", "gloo"): Exchange,  # messages between pairs of ranks: gloo's own reduce-scatter sends twice the least
    ("cuda", "nccl"): Grouped,  # one launch a bucket, the mean inside the collective
    ("cuda", "fake"): Grouped,  # stands in for NCCL: the same kernels and memory, no peers
}
# all others (fake on a CPU, mpi, gloo on a GPU, ...): Plain, one collective a tensor


FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))


def adds_up(transport: Transport) -> frozenset[torch.dtype]:
    """The dtypes of gradients that a transport can average: what torch adds up, or what backends do."""
    return FLOATS if isinstance(transport, Grouped | Plain) else FLOATS | COMPLEX


def transport_for(group: ProcessGroup, device: torch.device, role: int = 0) -> Transport:
    """The transport for tensors on ``device``; those of one model have different roles, if they may share a group.

    Raises:
        ValueError: the group has no backend for this device.
    """
    config = dist.get_backend_config(group)  # "cpu:gloo,cuda:nccl"
    backend = dict(pair.split(":", 1) for pair in config.split(",")).get(device.type)
    if backend is None:
        raise ValueError(
            f"the process group's backend is {config!r}, which carries no {device.type} tensors; move the module to "
            f"a device that it carries, or give a group with a backend for {device.type} (gloo for CPU)"
        )
    if dist.get_world_size(group) == 1:
        return Alone()
    return BACKENDS.get((device.type, backend), Plain)(group, role)

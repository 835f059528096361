"""The protocol that every transport of collectives follows, and the transport of a world of one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from thunder_zero.comm.handle import Handle, Result, Waitable
from thunder_zero.plan import Param

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))


class Transport(Protocol):
    """Launches the collectives of one bucket at a time; all tensors of a bucket share a dtype.

    Every rank launches the same buckets in the same order, from one thread. Inputs must not change
    until the handle's ``wait``.

    Attributes:
        averages: dtypes of gradients that it can average.
    """

    averages: frozenset[torch.dtype]

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

    averages = FLOATS | COMPLEX

    def __init__(self) -> None:
        self._pending: set[Handle] = set()

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

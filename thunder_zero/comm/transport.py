"""Defines the base class of transports, and the transport of a single rank.

In: tensors of a bucket, one dtype. Out: a handle, whose ``wait`` gives the results::

    all_gather       shards     (rows / W, ...)  ->  parameters  (rows, ...)      each rank's rows to all
    reduce_scatter   gradients  (rows, ...)      ->  means       (rows / W, ...)  this rank's rows
    all_reduce       gradients  (rows, ...)      ->  means       (rows, ...)      of replicated parameters
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from thunder_zero.comm.handle import Handle, Waitable, WaitsBy

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
COMPLEX = frozenset((torch.complex64, torch.complex128))
Shape = tuple[int, ...]
PeerBuffers = Mapping[int, Sequence[Tensor]]  # 1-D contiguous tensors, keyed by rank
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_autograd(function: Function) -> Function:
    """Hide a function from autograd, which may save its results even if they are computed under inference mode."""
    outside = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Programs already run without gradients, and entering both modes costs more than the check.
        needs_modes = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        return (outside if needs_modes else function)(*args, **kwargs)

    return cast(Function, wrapper)


class Transport(ABC):
    """The interface of transports. A transport launches the collectives of one bucket at a time.

    All tensors of a bucket share a dtype. The dtypes of gradients must be in ``averages``. All ranks launch equal
    buckets in one order, each from one thread. Inputs must not change before the handle's ``wait`` returns.
    """

    averages: frozenset[torch.dtype]
    world_size: int  # the number of ranks of the transport
    rank: int  # this rank's index among them

    def __init__(self) -> None:
        self._pending: set[Handle] = set()  # handles in flight, which add and remove themselves

    @abstractmethod
    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather contiguous tensors of shape ``layout.shard_shape(shape, W)``; ``shapes`` have no padding.

        The handle returns the full, unpadded, contiguous tensors: views of ``into`` if it is given. Its buffers have
        the shape ``layout.padded_shape(shape, W)``, and already contain this rank's shards.
        """

    @abstractmethod
    def reduce_scatter(self, grads: Sequence[Tensor]) -> Waitable:
        """Average full tensors over ranks. The tensors may be non-contiguous.

        The handle returns this rank's rows of the means, ``layout.shard_shape(grad.shape, W)``, with zeros as padding.
        """

    @abstractmethod
    def all_reduce(self, grads: Sequence[Tensor]) -> Waitable:
        """Average full tensors over ranks. The handle returns new tensors (for W > 1), equal on all ranks."""

    @abstractmethod
    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Waitable:
        """Send the tensors in ``outgoing``, and receive into the tensors in ``incoming``. The keys are ranks.

        Sender and receiver list equal sizes in one order, and all tensors of a call have one dtype. The handle's
        ``wait`` returns an empty tuple once ``incoming`` is complete.
        """

    def in_two(
        self, first: Callable[[Transport], Waitable], second: Callable[[Transport, tuple[Tensor, ...]], Waitable]
    ) -> Waitable:
        """Launch ``first``, then ``second`` with the results of ``first``; return the handle of ``second``.

        Each function launches on the transport that it receives. ``second`` is launched in the background when
        ``first`` has ended. On a backend that orders launches by streams, the handle's ``wait`` launches ``second``.
        """
        handle = first(self)
        return WaitsBy(lambda: second(self, handle.wait()).wait())

    def with_tag(self, tag: int, compare: Callable[[], object]) -> Transport:
        """Return a transport whose messages match only messages with this tag, 0 to 2 ** 22 - 1.

        The returned transport shares its handles in flight with this transport. Background threads call ``compare``
        before they wait for messages: it waits until ranks have compared the tag, and raises if they differ, when no
        message would arrive. A backend without tags returns this transport, and matches messages by order alone.
        """
        return self

    @property
    def in_flight(self) -> bool:
        return bool(self._pending)

    def drain(self) -> None:
        """Wait for all launches of a failed step. Every rank must have failed after the same number of launches.

        If the backend raises, the remaining handles stay pending.
        """
        while self._pending:
            next(iter(self._pending)).settle()


class SingleRank(Transport):
    """The transport of a single rank: it sends nothing."""

    averages = FLOATS | COMPLEX
    world_size, rank = 1, 0

    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Handle:
        fulls = tuple(shard.detach() for shard in (shards if into is None else into))
        return Handle((), fulls, self._pending)

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Handle:
        return Handle((), tuple(grad.contiguous() for grad in grads), self._pending)

    all_reduce = reduce_scatter

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Handle:
        assert len(outgoing) + len(incoming) == 0, "one rank alone has no peers"
        return Handle((), (), self._pending)

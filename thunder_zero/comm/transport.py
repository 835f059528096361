"""What all transports do and share, and the transport of one rank alone.

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
PeerBuffers = Mapping[int, Sequence[Tensor]]  # 1-D contiguous tensors, by a rank of the transport
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_autograd(function: Function) -> Function:
    """Hide a function from autograd. Its results are normal tensors even under inference mode, so that autograd may
    save them."""
    outside = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        # Programs run without gradients anyway, and entering both modes costs more than asking.
        inside = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        return (outside if inside else function)(*args, **kwargs)

    return cast(Function, wrapper)


class Transport(ABC):
    """The interface of a transport, which launches the collectives of one bucket at a time.

    All tensors of a bucket share a dtype; those of gradients are among ``averages``. Every rank launches the same
    buckets in the same order, from one thread. Inputs must not change before the handle's ``wait`` returns.
    """

    averages: frozenset[torch.dtype]
    world_size: int  # ranks of its group
    rank: int  # this rank's number among them

    @abstractmethod
    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Waitable:
        """Gather sharded tensors.

        Args:
            shards: contiguous, each ``layout.shard_shape(shape, W)``.
            shapes: of the full tensors, without padding.
            into: buffers of ``layout.padded_shape(shape, W)`` in which this rank's rows already are the
                shards; the other rows are filled.

        Returns:
            A handle of the full, unpadded, contiguous tensors (views of ``into``, if given).
        """

    @abstractmethod
    def reduce_scatter(self, grads: Sequence[Tensor]) -> Waitable:
        """Average full tensors over ranks, contiguous or not.

        The handle has this rank's rows of the means, ``layout.shard_shape(grad.shape, W)``, zero in the padding.
        """

    @abstractmethod
    def all_reduce(self, grads: Sequence[Tensor]) -> Waitable:
        """Average full tensors over ranks. The handle has the means, equal on all ranks, in new tensors (for W > 1)."""

    @abstractmethod
    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Waitable:
        """Send tensors to other ranks, and receive others from them, by rank.

        Both ends list the same sizes in the same order, and all tensors of a call have one dtype. ``incoming`` is
        complete when the handle's ``wait``, without results, returns.
        """

    def in_two(
        self, first: Callable[[Transport], Waitable], second: Callable[[Transport, tuple[Tensor, ...]], Waitable]
    ) -> Waitable:
        """Launch ``first`` and then, with its results, ``second``, each on the transport that it is called with.

        The handle returned is that of ``second``. It is launched in the background when ``first`` has ended. A backend
        that orders launches by streams launches it where the handle is waited for.
        """
        handle = first(self)
        return WaitsBy(lambda: second(self, handle.wait()).wait())

    def with_tag(self, tag: int) -> Transport:
        """Return this transport, whose messages meet only messages with this tag, 0 to 2 ** 22 - 1.

        A handle is in flight for both transports. A backend without tags, which matches by order alone, ignores the
        tag.
        """
        return self

    @property
    @abstractmethod
    def in_flight(self) -> bool:
        """True if a handle was launched and has not ended."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all that a failed step left in flight. Every rank must have failed at the same point of the step."""


class Launching(Transport):
    """A base class of transports that keeps the handles in flight."""

    def __init__(self) -> None:
        self._pending: set[Handle] = set()

    @property
    def in_flight(self) -> bool:
        return bool(self._pending)

    def drain(self) -> None:
        """Wait for all that a failed step left in flight. If the backend fails, the remaining handles stay pending."""
        while self._pending:
            next(iter(self._pending)).settle()


class SingleRank(Launching):
    """The transport of one rank alone: it sends nothing."""

    averages = FLOATS | COMPLEX
    world_size, rank = 1, 0

    def all_gather(
        self, shards: Sequence[Tensor], shapes: Sequence[Shape], into: Sequence[Tensor] | None = None
    ) -> Handle:
        """Return the shards as the parameters, since this rank has all rows."""
        fulls = tuple(shard.detach() for shard in (shards if into is None else into))
        return Handle((), fulls, self._pending)

    def reduce_scatter(self, grads: Sequence[Tensor]) -> Handle:
        """Return the gradients as the means."""
        means = tuple(grad.contiguous() for grad in grads)
        return Handle((), means, self._pending)

    all_reduce = reduce_scatter

    def trade(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> Handle:
        """Do nothing: there are no peers."""
        assert len(outgoing) + len(incoming) == 0, "one rank alone has no peers"
        return Handle((), (), self._pending)

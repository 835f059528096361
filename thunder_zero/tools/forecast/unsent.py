"""A wire that allocates the buffers of a step and sends nothing, for a rank without peers.

::

    rehearsal of rank 0 of 8    gather    allocates full parameters, and the transport's buffers; no message
                                wait      returns the full parameters at once, without values

Only the calls to the backend are replaced. So forecasts include all buffers of a transport. The transports run on
meta tensors. ``torch.distributed`` need not be initialised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.handle import BucketPart, Result
from thunder_zero.comm.native import CoalescedNccl, PerTensor, keep_alive
from thunder_zero.comm.pairwise import AwaitMessage, GlooBucket, PairwiseGloo, StartMessage
from thunder_zero.comm.transport import PeerBuffers, SingleRank, Transport
from thunder_zero.encodings.encoding import PIECE, PIECE_ON_GPU
from thunder_zero.encodings.int8 import weyl
from thunder_zero.encodings.nf4 import pairs_on
from thunder_zero.plan.mesh import ALL, REPLICATE, SHARD, TENSOR
from thunder_zero.plan.params import Param, Plan
from thunder_zero.sharded.wire import Wire


class _UnsentBucket(GlooBucket):
    """A gloo bucket that sends no messages. Each wait keeps the tensor of its message alive."""

    def _begin_to_post(self) -> Callable[[], object]:
        """Post on this thread, so that a forecast does not depend on the time at which another thread ends."""
        self._post()
        return lambda: None

    def start_all(self, start: StartMessage, tensors: dict[int, Tensor], tag: int) -> list[AwaitMessage]:
        """Return a wait for each tensor, which keeps the tensor alive."""
        return [keep_alive(tensor) for tensor in tensors.values() if tensor.numel()]


class _UnsentPairwiseGloo(PairwiseGloo):
    """Gloo's transport without its messages and threads."""

    def _average_in_background(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Return ``start`` unchanged, to compute the average in the wait instead of on a thread."""
        return start

    def _bucket(self) -> GlooBucket:
        return _UnsentBucket(self._group, self._tag)


class _NotLaunched:
    """A mixin that launches no collective, for transports over the backend's collectives."""

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        return [BucketPart((lambda: calls,))]

    def _start_messages(self, outgoing: PeerBuffers, incoming: PeerBuffers) -> list[BucketPart]:
        return [BucketPart((lambda: (outgoing, incoming),))]


class _UnsentCoalescedNccl(_NotLaunched, CoalescedNccl):
    """NCCL's transport without its collectives."""


class _UnsentPerTensor(_NotLaunched, PerTensor):
    """The transport for all other backends, without its collectives."""


TRANSPORTS: Mapping[str, Callable[[ProcessGroup], Transport]] = {
    "gloo": _UnsentPairwiseGloo,
    "nccl": _UnsentCoalescedNccl,
    "mpi": _UnsentPerTensor,
}


class UnsentWire(Wire):
    """A wire without peers, for the plan's rank. Tensors for host memory are also on ``device``, the meta device.

    ``backend`` is a key of ``TRANSPORTS``.
    """

    def __init__(self, plan: Plan, backend: str, device: torch.device) -> None:
        axes = {over: plan.mesh.over(over) for over in (SHARD, REPLICATE, ALL, TENSOR)}
        groups = {over: ProcessGroup(HashStore(), axis.place, axis.size) for over, axis in axes.items()}
        transports = {
            over: SingleRank() if group.size() == 1 else TRANSPORTS[backend](group) for over, group in groups.items()
        }
        super().__init__(TaggedTransport(transports, "the model", groups[ALL], announces=False), plan, device)
        self._piece = PIECE if backend == "gloo" else PIECE_ON_GPU
        # Build the encodings' tables now, so that no forecast counts them: they stay in the process.
        for block in {param.reduce_format.block for param in plan.params if param.reduce_format}:
            weyl(max(self._piece, block), device)
        pairs_on(device)

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().clone() if self._plan.rests_on_host(param) else shard.detach()

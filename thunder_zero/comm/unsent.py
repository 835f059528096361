"""Transports that allocate what the real ones do and send nothing, for a forecast of memory.

They are the real ones but for the calls that reach the backend, so that a buffer which is added there is forecast, too.
They need neither ``torch.distributed`` to be initialised nor peers, and work on tensors without values (meta).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.comm.handle import BucketPart, Result
from thunder_zero.comm.hybrid import Hybrid
from thunder_zero.comm.native import CoalescedNccl, PerTensor
from thunder_zero.comm.pairwise import Message, PairwiseGloo, Wait
from thunder_zero.comm.staging import HostCopies, Staging, needs_staging
from thunder_zero.comm.transport import SingleRank, Transport
from thunder_zero.plan import Param, Plan


class UnsentPairwiseGloo(PairwiseGloo):
    """gloo's transport without its messages and threads."""

    def run_after(self, start: Callable[[], Result]) -> Callable[[], Result]:
        """Run it when its result is waited for."""
        return start

    def _post(self, task: Callable[[], None]) -> Wait:
        task()
        return lambda: None

    def _start(self, message: Message, tensor: Tensor, rank: int, tag: int) -> Wait:
        return lambda: tensor  # a message keeps its tensor alive until it is waited for


class _NotLaunched:
    """In front of a transport over the backend's collectives: starts none of them."""

    def _launch(self, collective: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[BucketPart]:
        return [BucketPart((lambda: calls,))]

    def _start_messages(self, ops: Sequence[dist.P2POp]) -> list[BucketPart]:
        return [BucketPart((lambda: ops,))]


class UnsentCoalescedNccl(_NotLaunched, CoalescedNccl):
    """NCCL's transport without its collectives."""


class UnsentPerTensor(_NotLaunched, PerTensor):
    """The transport of other backends without its collectives."""


UNSENT: Mapping[str, Callable[[ProcessGroup], Transport]] = {
    "gloo": UnsentPairwiseGloo,
    "nccl": UnsentCoalescedNccl,
    "mpi": UnsentPerTensor,
}


class UnsentStaging(Staging):
    """Staging where host memory and the device are both meta."""

    def _on_device(self, shard: Tensor, param: Param) -> Tensor:
        return shard.detach().clone() if self._plan.rests_on_host(param) else shard.detach()


def unsent_transport(plan: Plan, backend: str, copies: HostCopies, model: str) -> TaggedTransport:
    """The transport of a model's rank, by the name of its backend: a key of ``UNSENT``.

    The tensors that it gets and makes are on the meta device.
    """
    transport = _alone_or(UNSENT[backend], plan.world_size, plan.rank)
    if plan.replicas > 1:
        across = _alone_or(UNSENT[backend], plan.replicas, 0)
        transport = Hybrid(transport, across, _alone_or(UNSENT[backend], plan.ranks, plan.rank), plan)
    device = torch.device("meta")
    if needs_staging(plan, device):
        transport = UnsentStaging(transport, plan, device, copies)
    return TaggedTransport(transport, model, ProcessGroup(HashStore(), plan.rank, plan.ranks), announces=False)


def _alone_or(kind: Callable[[ProcessGroup], Transport], world_size: int, rank: int) -> Transport:
    return SingleRank() if world_size == 1 else kind(ProcessGroup(HashStore(), rank, world_size))

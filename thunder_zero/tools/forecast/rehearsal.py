"""The runtime of traces whose memory is forecast: transports send nothing, tensors have no values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thunder_zero.comm.handle import Waitable
from thunder_zero.comm.unsent import unsent_transport
from thunder_zero.plan import Plan
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.calls import sum_and_cast
from thunder_zero.runtime.memory import lay_out
from thunder_zero.runtime.resident import ResidentParameters
from thunder_zero.runtime.versions import Versions
from thunder_zero.schedule.program_name import ProgramName
from thunder_zero.tools.forecast.watch import META


class Rehearsal:
    """The runtime of a model's traces (:class:`thunder_zero.traces.symbols.Runtime`) in a forecast of memory.

    As :class:`thunder_zero.runtime.calls.Calls`, without checks and clocks. ZeRO-1 refreshes all of its parameters, as
    after an optimizer's step. A parameter of an earlier micro-batch that ``gather_once_per_accumulation`` holds over is
    gathered anew.

    Args:
        plan: of the model.
        backend: the name of the process group's backend.

    Attributes:
        shards: this rank's parameters by path.
    """

    device = META

    def __init__(self, plan: Plan, backend: str, *, synced: bool) -> None:
        self.synced = synced
        self._plan = plan
        self._transport = unsent_transport(plan, backend)
        self.accumulation = Accumulation()
        whole = {
            param.path: torch.empty(
                param.shape if param.resident or not param.sharded else plan.shard_shape(param),
                dtype=param.dtype,
                device=META,
            )
            for param in plan.params
        }
        memory = lay_out(plan, META, whole)
        self.shards = {param.path: nn.Parameter(memory.rows[param.path], param.requires_grad) for param in plan.params}
        self._buffers = memory.buffers
        self._resident = ResidentParameters(memory.buffers, memory.shared, Versions(self.shards), {})
        self._resident.mark_stale(memory.buffers)

    def at_rest(self) -> Iterator[tuple[str, Tensor]]:
        """Paths and tensors of what is there at rest: shards, and ZeRO-1's full parameters."""
        yield from self.shards.items()
        yield from self._buffers.items()

    def on_host(self) -> Iterator[Tensor]:
        """Those of them that rest in host memory instead (``cpu_offload``)."""
        return (self.shards[param.path] for param in self._plan.params if self._plan.rests_on_host(param))

    def trained_on_device(self) -> dict[str, nn.Parameter]:
        """The shards whose optimizer state rests on the device, by path."""
        params = self._plan.params
        return {
            param.path: self.shards[param.path]
            for param in params
            if param.requires_grad and not self._plan.rests_on_host(param)
        }

    def all_gather(self, shards: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start gathering."""
        params = [self._plan.by_name[path] for path in paths]
        if params[0].resident:
            return self._resident.gather(shards, params, self._transport)
        if self._plan.rests_on_host(params[0]):
            shards = [shard.clone() for shard in shards]  # on the device
        return self._transport.all_gather(shards, params)

    def reduce(self, grads: Sequence[Tensor], paths: Sequence[str]) -> Waitable:
        """Start reducing gradients, with their deferred sums."""
        params = [self._plan.by_name[path] for path in paths]
        sums = []
        for grad, param in zip(grads, params, strict=True):
            deferred, grad = self.accumulation.take(param.path), sum_and_cast(grad, param)
            sums.append(grad if deferred is None else deferred.add_(grad))
        start = self._transport.reduce_scatter if params[0].sharded else self._transport.all_reduce
        return start(sums, params)

    def defer(self, grad: Tensor, path: str) -> None:
        """Keep a full gradient."""
        self.accumulation.defer(sum_and_cast(grad, self._plan.by_name[path]), path)

    def accumulate(self) -> Iterator[str]:
        """Hold a deferred gradient of each trained parameter, as after a micro-batch under ``no_sync``. Yields the path
        of each when it is there."""
        for param in self._plan.params:
            if param.requires_grad:
                self.accumulation.defer(torch.empty(param.shape, dtype=param.reduce_dtype, device=META), param.path)
                yield param.path

    def apart(self, shard: Tensor) -> Tensor:
        """The shard."""
        return shard

    def _nothing(self, *args: Any) -> None:
        """Takes no memory that matters: flags and digests."""

    enter = check_synced = reduce_deferred = check_finite = land = _nothing

    def agree_on_schedule(self, program: ProgramName, lines: Sequence[str]) -> None:
        """There is no other rank."""

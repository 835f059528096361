"""One rank's share of a model without values, over which a forecast runs the calls of traces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from thunder_zero.comm.backends import unsent_transport
from thunder_zero.comm.staging import HostCopies
from thunder_zero.plan import Plan
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.state import Share
from thunder_zero.runtime.writes import digests_of
from thunder_zero.tools.forecast.watch import META


class Rehearsal(Share):
    """A share without values, over which :class:`thunder_zero.runtime.calls.Calls` runs in a forecast of memory.

    ZeRO-1 refreshes all of its parameters, as after an optimizer's step. A parameter of an earlier micro-batch that
    ``gather_once_per_accumulation`` keeps unsharded is gathered anew.

    Args:
        plan: of the model.
        backend: the name of the process group's backend.
        synced: whether the step reduces gradients, or defers them.
    """

    def __init__(self, plan: Plan, backend: str, *, synced: bool) -> None:
        with _disable_current_modes():
            digests_of([torch.empty(1, device=META)])  # makes its weights, which stay in the process
        copies = HostCopies(META, offloaded=False)
        transport = unsent_transport(plan, backend, copies, "the model")
        whole = {
            param.path: torch.empty(
                param.shape if param.resident or not param.sharded else plan.shard_shape(param),
                dtype=param.dtype,
                device=META,
            )
            for param in plan.params
        }
        super().__init__(plan, META, "the model", transport, copies, whole, {}, digests=False)
        self.accumulation = Accumulation(synced=synced)
        self.resident.mark_stale(self.shards)

    def at_rest(self) -> Iterator[tuple[str, Tensor]]:
        """Paths and tensors of what is there at rest: shards, and ZeRO-1's full parameters."""
        yield from self.rows.items()
        yield from ((param.path, self.resident.full(param)) for param in self.plan.params if param.resident)

    def on_host(self) -> Iterator[Tensor]:
        """Those of them that rest in host memory instead (``cpu_offload``)."""
        return (self.rows[param.path] for param in self.plan.params if self.plan.rests_on_host(param))

    def trained_on_device(self) -> dict[str, nn.Parameter]:
        """The shards whose optimizer state rests on the device, by path."""
        params = self.plan.params
        return {
            param.path: self.shards[param.path]
            for param in params
            if param.requires_grad and not self.plan.rests_on_host(param)
        }

    def accumulate(self) -> Iterator[str]:
        """Hold a deferred gradient of each trained parameter, as after a micro-batch under ``no_sync``. Yields the path
        of each when it is there."""
        for param in self.plan.params:
            if param.requires_grad:
                self.accumulation.defer(torch.empty(param.shape, dtype=param.reduce_dtype, device=META), param.path)
                yield param.path

"""What the calls of traces need of one rank's share of a model, with values or without."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor, nn

from thunder_zero.comm.host_copies import HostCopies
from thunder_zero.comm.placed import Placed
from thunder_zero.plan import Plan
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.clock import Clock
from thunder_zero.runtime.held_over import HeldOver
from thunder_zero.runtime.memory import lay_out
from thunder_zero.runtime.profile_labels import Labels
from thunder_zero.runtime.resident import ResidentParameters
from thunder_zero.runtime.versions import Versions


class Share:
    """One rank's share of one model, as if it had no peers: the transport alone knows them.

    Args:
        digests: look for writes to the shards of resident parameters that raise no version.
        at_rest: values by path, in full (ZeRO-1, replicated) or this rank's rows; emptied.

    Attributes:
        plan: what each parameter is.
        device: where compute is.
        name: of the model, the same on all ranks, as errors call it: ``"model 0 (Net)"``.
        transport: launches the collectives.
        copies: copies of shards in host memory to the device, which may still run.
        shards: the optimizer's parameters by path: this rank's rows, or the full parameter.
        accumulation: gradients whose reduction is deferred.
        resident: ZeRO-1's full parameters.
        held_over: gathered parameters that the next micro-batch reads again.
        clock: records waits while ``measure_times`` runs.
        labels: labels waits and units while a profiler runs.
        training_forwards: how many forwards have ended in training mode and with gradients enabled.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        name: str,
        transport: Placed,
        copies: HostCopies,
        at_rest: dict[str, Tensor],
        *,
        digests: bool = True,
    ) -> None:
        self.plan, self.device, self.name, self.transport, self.copies = plan, device, name, transport, copies
        self.accumulation = Accumulation()
        self.training_forwards = 0
        self.clock = Clock(device)
        self.labels = Labels(plan)
        memory = lay_out(plan, device, at_rest)
        self.shards = {param.path: nn.Parameter(memory.rows[param.path], param.requires_grad) for param in plan.params}
        versions = Versions(self.shards)
        is_copied = plan.world_size > 1 or len(memory.shared) < len(memory.buffers)
        digested = {path: self.shards[path] for path in memory.buffers} if digests and is_copied else {}
        self.resident = ResidentParameters(memory.buffers, memory.shared, versions, digested)
        self.held_over = HeldOver(self.shards, versions)

    def on_any_rank(self, paths: Sequence[str], here: Container[str], also: Tensor | None = None) -> list[str]:
        """Those of ``paths`` that any rank has in ``here``, or flags in ``also`` (a bool for each path): other ranks
        are as this one, and nothing is flagged."""
        return [path for path in paths if path in here]

    def first_on_any_rank(self, flags: Tensor) -> int | None:
        """The first flag that any rank has set: none has."""
        return None

    def require_same_schedule(self, program: str, lines: Sequence[str]) -> None:
        """Compare the collectives of a program between ranks: there is no other rank."""

    def drop_deferred(self) -> None:
        """Abandon the accumulation: its deferred gradients and the gathered parameters that it holds over."""
        self.accumulation.drop()
        self.held_over.clear()

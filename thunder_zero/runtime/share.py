"""What the calls of traces need of one rank's share of a model, with values or without."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from thunder_zero.comm.host_copies import HostCopies
from thunder_zero.comm.placed import Placed
from thunder_zero.plan import Plan
from thunder_zero.rows import real_rows
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.clock import Clock
from thunder_zero.runtime.dtensors import as_dtensor, parameter
from thunder_zero.runtime.held_over import HeldOver
from thunder_zero.runtime.memory import lay_out
from thunder_zero.runtime.profile_labels import Labels
from thunder_zero.runtime.resident import ResidentParameters
from thunder_zero.runtime.versions import Versions


class Share:
    """One rank's share of one model, as if it had no peers: the transport alone knows them.

    Args:
        at_rest: values by path, in full (ZeRO-1, replicated) or this rank's rows; emptied.
        specs: how ranks share each parameter, by path; none in stage 0, and where there are no peers.
        digests: look for writes to the rows of resident parameters that raise no version.

    Attributes:
        plan: what each parameter is.
        device: where compute is.
        name: of the model, the same on all ranks, as errors call it: ``"model 0 (Net)"``.
        transport: launches the collectives.
        copies: copies of shards in host memory to the device, which may still run.
        rows: what programs read, by path: this rank's rows with their padding, or the full parameter.
        specs: as given.
        frozen: paths of the parameters that do not train.
        single_rows: paths of the sharded parameters of one row.
        shards: the optimizer's parameters by path, in the same memory: DTensors, if there are specs.
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
        specs: Mapping[str, DTensorSpec],
        *,
        digests: bool = True,
    ) -> None:
        self.plan, self.device, self.name, self.transport, self.copies = plan, device, name, transport, copies
        self.accumulation = Accumulation()
        self.training_forwards = 0
        self.clock = Clock(device)
        self.labels = Labels(plan)
        memory = lay_out(plan, device, at_rest)
        self.rows, self.specs = memory.rows, specs
        self.frozen = frozenset(param.path for param in plan.params if not param.requires_grad)
        self.single_rows = frozenset(param.path for param in plan.params if param.sharded and param.shape[0] == 1)
        self.shards: dict[str, nn.Parameter] = {}
        self._layouts: dict[str, tuple[int | None, DTensorSpec | None]] = {}  # how many rows, if there is padding
        for param in plan.params:
            rows, spec = real_rows(memory.rows[param.path].detach(), param, plan), specs.get(param.path)
            self.shards[param.path] = parameter(rows, spec, requires_grad=param.requires_grad)
            self._layouts[param.path] = len(rows) if param in plan.padded else None, spec
        versions = Versions(self.shards)
        is_copied = plan.world_size > 1 or len(memory.shared) < len(memory.buffers)
        digested = {path: self.rows[path] for path in memory.buffers} if digests and is_copied else {}
        self.resident = ResidentParameters(memory.buffers, memory.shared, versions, digested)
        self.held_over = HeldOver(self.rows, versions)

    def gradient(self, rows: Tensor, path: str) -> Tensor:
        """The gradient of a shard, from its rows with their padding."""
        count, spec = self._layouts[path]
        return as_dtensor(rows if count is None else rows[:count], spec)

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

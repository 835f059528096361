"""Holds one rank's share of one model: shards, placeholders, and what lives as long as they do.

Training code steps the shards; compiled traces reach this state through ``calls.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from thunder_zero.comm.backends import model_transport
from thunder_zero.comm.group import Ranks
from thunder_zero.comm.peers import all_reduce_max, barrier
from thunder_zero.plan import Param, Plan
from thunder_zero.runtime.accumulation import Accumulation
from thunder_zero.runtime.clock import Clock
from thunder_zero.runtime.memory import lay_out
from thunder_zero.runtime.placeholders import placeholder
from thunder_zero.runtime.resident import Buffers, HeldOver, Versions


class State:
    """One rank's share of one model.

    Attributes:
        plan: what each parameter is.
        ranks: the process groups that train the model.
        group: all of these ranks.
        device: where compute is.
        shards: the optimizer's parameters by path: this rank's rows, or the full parameter.
        placeholders: the plain module's parameters from now on, by path: full shape, no memory.
        accumulation: gradients whose reduction is deferred.
        resident: ZeRO-1's full parameters.
        held_over: gathered parameters that an accumulation goes on with.
        clock: records waits while ``measure_times`` runs.
        transport: launches the collectives.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, ranks: Ranks, device: torch.device, at_rest: dict[str, Tensor]
    ) -> None:
        """Take over the parameters of a plain module, which stays as it is.

        Args:
            module: has the original parameters.
            plan: what each of them is.
            ranks: the process groups that train the model.
            device: where compute is.
            at_rest: their values by path, full or this rank's rows (:func:`thunder_zero.rows.at_rest_of`); emptied.
        """
        self.plan, self.ranks, self.group, self.device = plan, ranks, ranks.everyone, device
        self.accumulation = Accumulation()
        self.clock = Clock(device)
        self.transport = model_transport(plan, ranks, device)
        memory = lay_out(plan, device, at_rest)
        self.shards = {param.path: nn.Parameter(memory.rows[param.path], param.requires_grad) for param in plan.params}
        self.placeholders = {
            param.path: placeholder(module.get_parameter(param.path), param.compute_dtype, device)
            for param in plan.params
        }
        versions = Versions(self.shards)
        self.resident = Buffers(memory.buffers, memory.shared, versions)
        self.held_over = HeldOver(versions)
        self.gradients_are_new = False  # some were reduced since the ranks last agreed on the stale buffers

    def agree_on_stale(self) -> None:
        """Let all ranks refresh what changed on any.

        Asked after each backward, since then an optimizer may have stepped on some ranks and not on
        others (a scaler that found an Inf), and when something changed here by other means: loaded,
        initialised or updated in place. One small collective; none while nothing can have changed.
        What is changed by other means has to be changed on all ranks, as with any replicated
        parameter: a rank that did not would not know that it is asked.
        """
        resident = self.resident
        resident.note_changed()
        if self.plan.ranks == 1 or not resident.paths or not (self.gradients_are_new or resident.stale):
            return
        resident.stale = set(self.on_any_rank(resident.paths, resident.stale))
        self.gradients_are_new = False

    def on_any_rank(self, paths: Sequence[str], here: Container[str]) -> list[str]:
        """Those of ``paths`` that are in ``here`` on any rank; one small collective."""
        flags = torch.tensor([path in here for path in paths], dtype=torch.int32, device=self.device)
        all_reduce_max(flags, self.group)
        return [path for path, flag in zip(paths, flags.tolist(), strict=True) if flag]

    def drop_deferred(self) -> None:
        """Forget what an accumulation has deferred so far, and let go of what it holds."""
        self.accumulation.drop()
        self.held_over.drop()

    def open_accumulation(self, shards: Iterable[Tensor]) -> str | None:
        """The first parameter of which a gradient is deferred, among those that have these shards."""
        if not self.accumulation.paths:
            return None
        among = set(map(id, shards))
        return next((path for path in self.accumulation.paths if id(self.shards[path]) in among), None)

    def mark_stale(self, paths: Iterable[str]) -> None:
        """These parameters changed: the next forward refreshes the other ranks' rows, if they are resident."""
        changed = tuple(paths)
        self.resident.mark_stale(changed)
        self.held_over.drop(changed)

    def gather_now(self, param: Param, shard: Tensor | None = None) -> Tensor:
        """The full, unpadded parameter from the shards as they are now, or what ``shard``, of the same shape and any
        dtype, is this rank's rows of; a collective."""
        shard = self.shards[param.path].detach() if shard is None else shard.contiguous()
        if not param.sharded:
            return shard.clone()
        exact = replace(param, compute_dtype=shard.dtype)
        return self.transport.all_gather([shard], [exact]).wait()[0].clone()

    def seconds_alone(self, paths: Sequence[str]) -> float:
        """Seconds in which these sharded parameters are gathered while nothing else travels; a collective."""
        params, shards = [self.plan.by_name[path] for path in paths], [self.shards[path].detach() for path in paths]
        barrier(self.group)
        start = self.clock.now()
        self.transport.all_gather(shards, params).wait()
        return start.until(self.clock.now())

"""Schedules a few blocks of a model for each stage, and forecasts time and memory on meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from thunder_zero.capture.compilations import uncollected
from thunder_zero.comm.slices import mesh_and_slices
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.dry_run import ProgramSource, fake_mesh
from thunder_zero.tools.forecast.around import loss_traffic
from thunder_zero.tools.forecast.fold import Fold
from thunder_zero.tools.forecast.for_loss import for_loss
from thunder_zero.tools.forecast.recorder import Recorder
from thunder_zero.tools.plan.repeat import NotPeriodic, WholeStep, whole_step
from thunder_zero.tools.plan.subject import Subject
from thunder_zero.tools.plan.training_plan import MeshShape
from thunder_zero.traces.compiled import Traces

Slicing = Mapping[str, ParallelStyle] | Callable[[nn.Module, DeviceMesh], object]
TRACED = (5, 6, 8)  # numbers of blocks to try, until the blocks repeat


@dataclass(frozen=True)
class SubjectPrograms:
    """The schedules of a subject."""

    subject: Subject  # the module to plan for
    asked: Policy  # a policy with the user's precision and formats
    shards: int  # number of ranks of a replica in schedules. They do not depend on this number.
    device: Device  # the device of the estimates
    tell: Callable[[str], None]  # a function that shows the current work
    slices: int = 1  # number of tensor-parallel ranks
    how: Slicing = field(default_factory=dict)  # the tensor-parallel plan
    captured: dict[int, ProgramSource] = field(default_factory=dict)  # captured modules, keyed by number of blocks
    # traces without lines, keyed by policy, presence of replicas, and number of blocks
    scheduled: dict[tuple[Policy, bool, int], Traces] = field(default_factory=dict)
    # a mapping from policies to the number of blocks to trace until their work repeats
    enough: dict[Policy, int] = field(default_factory=dict)

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of the largest block. This number does not depend on the policy."""
        policy = Policy(mixed_precision=self.asked.mixed_precision)
        with self._part() as (_, slices, partial):
            return make_plan(self.subject.module, policy, self._small_mesh(), slices, partial).largest_block_bytes

    def _small_mesh(self, replicas: int = 1) -> Mesh:
        return MeshShape(replicas, self.shards, self.slices).at_rank_0()

    @contextmanager
    def _part(self) -> Iterator[tuple[nn.Module, Mapping[str, int], frozenset[str]]]:
        """Yield a tensor-parallel rank's part, the sliced dimensions, and the parameters with partial gradients."""
        if self.slices == 1:
            yield self.subject.module, {}, frozenset()
            return
        self.tell(f"slices {self.subject.name} for {self.slices} ranks")
        with fake_mesh((1, self.slices)) as mesh:
            part = sliced_copy(self.subject.module, mesh["tp"], self.how)
            _, slices, partial = mesh_and_slices(part, mesh)
            yield part, slices, partial

    def policy(self, stage: int, recompute: str) -> Policy:
        """Return a policy that leads to equal schedules on all meshes.

        A bucket holds a block. One block is prefetched, and one reduction is in flight while backward computes the next
        block.
        """
        asked = self.asked if stage else Policy(mixed_precision=self.asked.mixed_precision)
        asked = replace(asked, frozen_format=None) if stage == 1 else asked
        policy = replace(asked, stage=stage, recompute=recompute)
        return replace(policy, bucket_bytes=self.block_bytes, prefetch=1, in_flight_bytes=2 * self.block_bytes)

    def evaluate(self, policy: Policy, mesh: MeshShape) -> tuple[WholeStep, int]:
        """Return the memory and the time of a step of the whole model, and the number of traced blocks.

        The number of traced blocks grows until the blocks repeat, up to all blocks.
        """
        alike = self.subject.alike
        for count in [count for count in (*TRACED, len(alike)) if count >= self.enough.get(policy, 0)]:
            traced = alike[:count]
            traces = self._schedule(policy, mesh, len(traced))
            self.tell(f"forecasts the memory of {STAGES[policy.stage].name} on {mesh}, recompute={policy.recompute!r}")
            with uncollected():
                fold = Fold(Recorder(traces, "nccl", self.subject.loss, FusedAdamW), traces.timeline).run()
            try:
                step = whole_step(fold, self.device, traced, len(alike) - len(traced))
            except NotPeriodic:
                continue
            self.enough[policy] = count
            return step, len(traced)
        raise AssertionError("a model that is traced whole repeats nothing")

    @cached_property
    def loss_bytes(self) -> int:
        """The bytes that ``Subject.loss`` and its gradient read and write. 0 if there is no loss."""
        return loss_traffic(next(iter(self.scheduled.values())), self.subject.loss) if self.subject.loss else 0

    def returns_loss(self) -> bool:
        """Return whether forward returns a single number, such as a loss."""
        traces = next(iter(self.scheduled.values()))
        flat = traces.forward.bound_symbols[-1].args[0]["flat_output"]
        return len(flat) == 1 and tuple(flat[0].shape) == ()

    def _schedule(self, policy: Policy, mesh: MeshShape, traced: int) -> Traces:
        """Return the traces for a mesh, without their lines.

        All meshes with replicas share one schedule. So do all meshes without replicas.
        """
        key = policy, mesh.replicas > 1, traced
        if key not in self.scheduled:
            with self.subject.with_blocks(traced), uncollected():
                captured, loss = self._capture(traced), self.subject.loss
                self.tell(f"schedules {STAGES[policy.stage].name}, recompute={policy.recompute!r}")
                traces = captured.schedule(policy, self._small_mesh(min(mesh.replicas, 2)))
                self.scheduled[key] = for_loss(traces, loss) if loss else traces
        traces = self.scheduled[key]
        timeline = replace(traces.timeline, plan=replace(traces.plan, mesh=mesh.at_rank_0()))
        return replace(traces, timeline=timeline)

    def _capture(self, traced: int) -> ProgramSource:
        """Return the module with ``traced`` blocks, captured once for all policies and meshes."""
        if traced not in self.captured:
            self.tell(f"captures {self.subject.name} with {traced} of {self.subject.blocks} blocks")
            policy, mesh, inputs = self.policy(3, "none"), self._small_mesh(), (self.subject.args, self.subject.kwargs)
            with self._part() as (part, slices, partial):
                self.captured[traced] = ProgramSource(
                    part, *inputs, policy, mesh, device=self.device, slices=slices, partial=partial
                )
        return self.captured[traced]


class FusedAdamW(torch.optim.AdamW):
    """What ``AdamW(fused=True)`` allocates: its state, and no temporaries. Its kernel does not run on meta tensors."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param not in self.state):
            state = self.state[param] = {name: torch.empty_like(param) for name in ("exp_avg", "exp_avg_sq")}
            state["step"] = torch.empty((), device=param.device)


def sliced_copy(module: nn.Module, mesh: DeviceMesh, slicing: Slicing) -> nn.Module:
    """Return a copy of the module on the meta device, sliced over a one-dimensional mesh."""
    tensors = chain(module.parameters(), module.buffers())
    memo: dict[int, Any] = {id(tensor): _without_values(tensor) for tensor in tensors}
    copy = deepcopy(module, memo)
    if callable(slicing):
        slicing(copy, mesh)
    else:
        parallelize_module(copy, mesh, dict(slicing))
    return copy


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

"""Compiles stages with few of a model's blocks, and evaluates the programs on meshes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from thunder_zero.comm.slices import mesh_and_slices
from thunder_zero.frontends.compilations import uncollected
from thunder_zero.frontends.compiled import Traces
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.params import Plan
from thunder_zero.plan.policy import STAGES, Policy
from thunder_zero.tools.absent_ranks import fake_mesh
from thunder_zero.tools.cost.estimate import Estimate
from thunder_zero.tools.devices.device import Device
from thunder_zero.tools.dry_run import ProgramSource, programs_of
from thunder_zero.tools.forecast.around import loss_traffic
from thunder_zero.tools.forecast.memory import memory
from thunder_zero.tools.planner.repeat import Held, NotPeriodic, estimate_whole, held_whole
from thunder_zero.tools.planner.slicing import Slicing, sliced_copy
from thunder_zero.tools.planner.subject import Subject
from thunder_zero.tools.planner.training_plan import MeshShape

TRACED = (5, 6, 8)  # alike blocks that are traced, the first that repeat


@dataclass(frozen=True)
class Evaluated:
    """A policy on a mesh."""

    held: Held
    estimate: Estimate
    traced: int  # alike blocks


@dataclass(frozen=True)
class SubjectPrograms:
    """The compiled programs of a subject, with the precision and the formats of ``asked``. ``shards`` are ranks of a
    copy, for the compilation: the schedule does not depend on how many. ``tell`` says what is done now. With more than
    one rank of tensor parallelism (``slices``), ``how`` slices the subject over them."""

    subject: Subject
    asked: Policy
    shards: int
    device: Device
    tell: Callable[[str], None]
    slices: int = 1
    how: Slicing = field(default_factory=dict)
    captured: dict[int, ProgramSource] = field(default_factory=dict)
    compiled: dict[tuple[Policy, bool, int], Traces] = field(default_factory=dict)
    enough: dict[Policy, int] = field(default_factory=dict)

    @cached_property
    def block_bytes(self) -> int:
        """Of the largest block, which no policy of the table changes."""
        policy = Policy(mixed_precision=self.asked.mixed_precision)
        return self.plan(policy, MeshShape(1, self.shards, self.slices)).largest_block_bytes

    def plan(self, policy: Policy, mesh: MeshShape) -> Plan:
        """The plan of the whole model, as the first rank sees it."""
        return make_plan(self.subject.module, policy, mesh.at_rank_0(), *self._sliced)

    @cached_property
    def _sliced(self) -> tuple[Mapping[str, int], frozenset[str]]:
        """The dimensions along which parameters of the whole model are sliced, and those whose gradients are summed
        over slices."""
        if self.slices == 1:
            return {}, frozenset()
        self.tell(f"slices {self.subject.name} for {self.slices} ranks")
        with fake_mesh((1, self.slices)) as mesh:
            _, slices, partial = mesh_and_slices(sliced_copy(self.subject.module, mesh["tp"], self.how), mesh)
            return slices, partial

    def policy(self, stage: int, recompute: str) -> Policy:
        """A policy with sizes that are the same on all meshes: a block is a bucket, one block is gathered ahead, and
        one reduction is under way while the next block's gradients are made."""
        asked = self.asked if stage else Policy(mixed_precision=self.asked.mixed_precision)
        asked = replace(asked, frozen_format=None) if stage == 1 else asked
        policy = replace(asked, stage=stage, recompute=recompute)
        return replace(policy, bucket_bytes=self.block_bytes, prefetch=1, in_flight_bytes=2 * self.block_bytes)

    def evaluate(self, policy: Policy, mesh: MeshShape) -> Evaluated:
        """The memory and the time of a step of the whole model. Traces few of its alike blocks, more if those do not
        repeat, and all of them if none of them do."""
        blocks = self.subject.blocks
        for count in [one for one in (*TRACED, blocks) if one >= self.enough.get(policy, 0)]:
            traced = min(count, blocks)
            try:
                found = self._evaluated(policy, mesh, traced)
            except NotPeriodic:
                continue
            self.enough[policy] = count
            return found
        raise AssertionError("a model that is traced whole repeats nothing")

    def _evaluated(self, policy: Policy, mesh: MeshShape, traced: int) -> Evaluated:
        copies = self.subject.blocks - traced
        units = self.subject.alike.units(traced) if self.subject.alike else ()
        traces = self._compiled(policy, mesh, traced)
        self.tell(f"forecasts the memory of {STAGES[policy.stage].name} on {mesh}, recompute={policy.recompute!r}")
        with uncollected():
            forecast = memory(traces, loss=self.subject.loss, optimizer=adamw, backend="nccl")
        held = held_whole(forecast, traces, units, copies)
        return Evaluated(held, estimate_whole(traces, self.device, units, copies), traced)

    @cached_property
    def loss_bytes(self) -> int:
        """Of memory that a given loss and its gradient read and write; of what was compiled."""
        return loss_traffic(next(iter(self.compiled.values())), self.subject.loss) if self.subject.loss else 0

    def returns_loss(self) -> bool:
        """Whether forward returns one number, as a loss is; of what was compiled."""
        traces = next(iter(self.compiled.values()))
        flat = traces.forward.output[0]["flat_output"]
        return len(flat) == 1 and tuple(flat[0].shape) == ()

    def _compiled(self, policy: Policy, mesh: MeshShape, traced: int) -> Traces:
        """The traces for a mesh: those of any mesh with another plan, since a schedule depends on nothing of it but
        whether there are copies of the model."""
        has_copies = mesh.replicas > 1
        if (policy, has_copies, traced) not in self.compiled:
            with self.subject.with_blocks(traced), uncollected():
                captured = self._captured(traced)
                self.tell(f"compiles {STAGES[policy.stage].name}, recompute={policy.recompute!r}")
                small = MeshShape(1 + has_copies, self.shards, self.slices)
                self.compiled[policy, has_copies, traced] = captured.under(policy, small.at_rank_0())
        traces = self.compiled[policy, has_copies, traced]
        return _on_mesh(traces, replace(traces.plan, mesh=mesh.at_rank_0()))

    def _captured(self, traced: int) -> ProgramSource:
        """The module with few blocks, captured once for all policies and meshes."""
        if traced not in self.captured:
            self.tell(f"captures {self.subject.name} with {traced} of {self.subject.blocks} blocks")
            policy, small = self.policy(3, "none"), MeshShape(1, self.shards, self.slices).at_rank_0()
            one = self.subject
            given: dict[str, Any] = {
                "args": one.args,
                "kwargs": one.kwargs,
                "policy": policy,
                "mesh": small,
                "device": self.device,
            }
            if self.slices == 1:
                self.captured[traced] = programs_of(one.module, **given)
            else:
                with fake_mesh((1, self.slices)) as mesh:
                    part = sliced_copy(one.module, mesh["tp"], self.how)
                    _, given["slices"], given["partial"] = mesh_and_slices(part, mesh)
                    self.captured[traced] = programs_of(part, **given)
        return self.captured[traced]


def _on_mesh(traces: Traces, plan: Plan) -> Traces:
    """The same program of a rank of another mesh."""
    lifted = traces.lifted
    return replace(
        traces,
        plan=plan,
        timeline=replace(traces.timeline, plan=plan),
        lifted=None if lifted is None else replace(lifted, plan=plan),
    )


def adamw(params: object) -> torch.optim.Optimizer:
    """AdamW without the temporaries of torch's ``foreach``: fused, it has none."""
    return torch.optim.AdamW(params, foreach=False)  # type: ignore[arg-type]

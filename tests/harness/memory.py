"""Runs models and records when the gathered parameters have memory.

A weak reference watches the storage of each gathered parameter. Any view keeps the storage alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import thunder_zero as tz
from tests.harness.models import (
    LENGTH,
    VOCABULARY,
    Patterns,
    fresh,
    from_parameters_alone,
    join_rows,
    parameter_inputs,
    relative_error,
    saved,
    sharded,
)
from tests.harness.timelines import in_flight_bytes
from thunder_zero.plan.make_plan import make_plan
from thunder_zero.plan.mesh import Mesh
from thunder_zero.schedule.lifetimes import gathered_bytes
from thunder_zero.schedule.ops import Gather
from thunder_zero.sharded.dtensors import local
from thunder_zero.sharded.runtime import ModelRuntime

TEXTBOOK = replace(tz.ZERO3, reshard_after_forward=True)
ROWS = 2  # rows of each rank's batch
STEPS = 2


@dataclass
class Watch:
    """The gathered parameters of one rank.

    Attributes:
        under_way: parameters whose gather is in flight.
        memory: gathered parameters with their storages.
        peak: largest number of bytes in flight and alive at one time.
        at_reductions: for each reduction, its parameters, and the parameters alive when it started.
    """

    plan: tz.schedule.Plan
    under_way: list[str] = field(default_factory=list)
    memory: list[tuple[str, StorageWeakRef]] = field(default_factory=list)
    peak: int = 0
    at_reductions: list[tuple[tuple[str, ...], set[str]]] = field(default_factory=list)

    def alive(self) -> set[str]:
        """Return the parameters whose gathered memory is still alive."""
        self.memory = [(path, memory) for path, memory in self.memory if not memory.expired()]
        return {path for path, _ in self.memory}

    def note_peak(self) -> None:
        """Update the peak. Two copies of a parameter, one for each phase, count twice."""
        self.alive()
        held = [*self.under_way, *(path for path, _ in self.memory)]
        self.peak = max(self.peak, sum(self.plan.by_name[path].full_bytes for path in held))


class Watched:
    """A gather's handle that notifies the watch when its parameters have arrived."""

    def __init__(self, handle: Any, paths: Sequence[str], watch: Watch) -> None:
        self._handle, self._paths, self._watch = handle, paths, watch
        watch.under_way += paths
        watch.note_peak()

    def wait(self) -> tuple[Tensor, ...]:
        full: tuple[Tensor, ...] = self._handle.wait()
        for path, tensor in zip(self._paths, full, strict=True):
            self._watch.under_way.remove(path)
            self._watch.memory.append((path, StorageWeakRef(tensor.untyped_storage())))
        self._watch.note_peak()
        return full


@contextlib.contextmanager
def watched(plan: tz.schedule.Plan) -> Iterator[Watch]:
    """Watch the models that are transformed inside the block."""
    watch = Watch(plan)
    gather, reduce = ModelRuntime.all_gather, ModelRuntime.reduce

    def watched_gather(calls: ModelRuntime, shards: Sequence[Tensor], paths: Sequence[str]) -> Any:
        return Watched(gather(calls, shards, paths), paths, watch)

    def watched_reduce(calls: ModelRuntime, grads: Sequence[Tensor], paths: Sequence[str]) -> Any:
        watch.at_reductions.append((tuple(paths), watch.alive()))
        return reduce(calls, grads, paths)

    with (
        mock.patch.object(ModelRuntime, "all_gather", watched_gather),
        mock.patch.object(ModelRuntime, "reduce", watched_reduce),
    ):
        yield watch


def batch(kind: type[nn.Module], rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind is Patterns:
        return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return torch.randn(ROWS, 7, generator=generator)


def autocast(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


@dataclass(frozen=True)
class Case:
    """A model and its settings."""

    kind: type[nn.Module]
    policy: tz.Policy
    autocast: bool = False
    fused: bool = False


def run(case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """Take some training steps. Return what is alive in the last step, and after inference."""
    plain = fresh(case.kind)
    options = {"fuse": "inductor"} if case.fused else {}
    with watched(make_plan(plain, case.policy, Mesh.of(world_size, rank))) as watch:
        model = sharded(plain, case.policy, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            watch.peak, watch.at_reductions = 0, []
            with autocast(case.autocast):
                y = model(batch(case.kind, rank, step))
            after_forward = watch.alive()
            y.float().square().mean().backward()
            after_backward = watch.alive()
            optimizer.step()
        traces = tz.traces_of(model)
        peak, at_reductions = watch.peak, watch.at_reductions
        with torch.inference_mode():
            inferred = model(batch(case.kind, rank, 0))
        return {
            "y": y.detach(),
            "grads": {name: local(param.grad) for name, param in model.named_parameters()},
            "after forward": after_forward,
            "after backward": after_backward,
            "after inference": watch.alive(),
            "inferred": inferred.clone(),
            "peak": peak,
            "planned peak": max(gathered_bytes(traces.timeline)),
            "in flight": max(in_flight_bytes(traces.timeline, Gather)),
            "at reductions": at_reductions,
            "kept unsharded": traces.plan.kept_unsharded,
            "again": {path for op in traces.backward_timeline.ops if isinstance(op, Gather) for path in op.params},
            "spread": spread(traces.forward_timeline),
            "saved of parameters": saved(traces.forward)
            & from_parameters_alone(traces.forward, parameter_inputs(traces)),
            "fused regions": sum(bsym.sym.is_fusion for bsym in traces.forward.bound_symbols),
        }


def spread(timeline: tz.schedule.Timeline) -> str:
    """Spell the order of a phase in letters: g(ather), w(ait), c(ompute). Consecutive computations are one letter."""
    letters = {"gather": "g", "wait": "w", "compute": "c", "return": "c", "free": ""}
    text = "".join(letters[op.kind] for op in timeline.ops)
    while "cc" in text:
        text = text.replace("cc", "c")
    return text


def eager(case: Case, world_size: int) -> tuple[list[Tensor], nn.Module]:
    """Return each rank's last output, and the model with the mean gradients of the last step."""
    model = fresh(case.kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        for rank in range(world_size):
            with autocast(case.autocast):
                outputs.append(model(batch(case.kind, rank, step)))
            (outputs[-1].float().square().mean() / world_size).backward()
        optimizer.step()
    return [y.detach() for y in outputs], model


def check_numbers(ranks: list[dict[str, Any]], case: Case) -> None:
    outputs, model = eager(case, len(ranks))
    tolerance = 3e-2 if case.autocast else 1e-5
    plan = make_plan(model, case.policy, Mesh.of(len(ranks)))
    for result, y in zip(ranks, outputs, strict=True):
        assert relative_error(result["y"], y) < tolerance
    for param in plan.params:
        mean = join_rows([rank["grads"][param.path] for rank in ranks], param.shape, sharded=param.sharded)
        grad = model.get_parameter(param.path).grad
        assert grad is not None
        assert relative_error(mean, grad) < tolerance, param.path

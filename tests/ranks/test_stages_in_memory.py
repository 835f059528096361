"""The stages are real: what is alive when, from live memory, while models train as eager does.

Every gathered parameter's memory is watched by a weak reference to its storage, which any view keeps alive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import thunder_zero as tz
from tests.harness.models import (
    LENGTH,
    PATTERNS_AGAIN,
    VOCABULARY,
    Mlp,
    Patterns,
    error,
    fresh,
    from_parameters_alone,
    parameter_inputs,
    saved,
    sharded,
    whole,
)
from tests.harness.ranks import RanksPool
from tests.harness.timelines import in_flight_bytes
from thunder_zero.plan import make_plan
from thunder_zero.runtime.state import State
from thunder_zero.schedule.timeline import Kind, gathered_bytes

from thunder.executors.torch_compile import torch_compile_ex

TEXTBOOK = replace(tz.ZERO3, gather_last_units_once=False)
ROWS = 2  # of each rank's batch
STEPS = 2


@dataclass
class Watch:
    """The gathered parameters of one rank: what is under way, and whose memory is alive.

    Attributes:
        peak: most bytes of both at once.
        at_reductions: for each reduction that started, what it reduces, and what was alive then.
    """

    plan: tz.Plan
    under_way: list[str] = field(default_factory=list)
    memory: list[tuple[str, StorageWeakRef]] = field(default_factory=list)
    peak: int = 0
    at_reductions: list[tuple[tuple[str, ...], set[str]]] = field(default_factory=list)

    def alive(self) -> set[str]:
        """The parameters whose gathered memory somebody still holds."""
        self.memory = [(path, memory) for path, memory in self.memory if not memory.expired()]
        return {path for path, _ in self.memory}

    def note_peak(self) -> None:
        """Two copies of a parameter, one for each half, count twice."""
        self.alive()
        held = [*self.under_way, *(path for path, _ in self.memory)]
        self.peak = max(self.peak, sum(self.plan.by_name[path].full_bytes for path in held))


class Watched:
    """A gather's handle that tells the watch when its parameters are there."""

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
def watched(plan: tz.Plan) -> Iterator[Watch]:
    """Models that are transformed within are watched."""
    watch = Watch(plan)
    gather, reduce = State.all_gather, State.reduce

    def watched_gather(state: State, shards: Sequence[Tensor], paths: Sequence[str]) -> Any:
        return Watched(gather(state, shards, paths), paths, watch)

    def watched_reduce(state: State, grads: Sequence[Tensor], paths: Sequence[str]) -> Any:
        watch.at_reductions.append((tuple(paths), watch.alive()))
        return reduce(state, grads, paths)

    with mock.patch.object(State, "all_gather", watched_gather), mock.patch.object(State, "reduce", watched_reduce):
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
    """How one model is run."""

    kind: type[nn.Module]
    policy: tz.Policy
    autocast: bool = False
    fused: bool = False  # torch_compile_ex


def live(rank: int, world_size: int, cases: tuple[Case, ...]) -> list[dict[str, Any]]:
    return [run(case, rank, world_size) for case in cases]


def run(case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """Some training steps; what is alive in the last one, and after an inference."""
    plain = fresh(case.kind)
    options = {"executors": [torch_compile_ex]} if case.fused else {}
    with watched(make_plan(plain, case.policy, world_size, rank)) as watch:
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
            "grads": {name: param.grad for name, param in model.named_parameters()},
            "after forward": after_forward,
            "after backward": after_backward,
            "after inference": watch.alive(),
            "inferred": inferred.clone(),
            "peak": peak,
            "planned peak": max(gathered_bytes(traces.timeline)),
            "in flight": max(in_flight_bytes(traces.timeline, Kind.GATHER)),
            "at reductions": at_reductions,
            "listed as kept": traces.plan.gathered_once,
            "again": {path for op in traces.backward_timeline.ops if op.kind is Kind.GATHER for path in op.params},
            "spread": spread(traces.forward_timeline),
            "saved of parameters": saved(traces.forward)
            & from_parameters_alone(traces.forward, parameter_inputs(traces)),
            "fused regions": sum(bsym.sym.is_fusion for bsym in traces.forward.bound_symbols),
        }


def spread(timeline: tz.Timeline) -> str:
    """The order of a half in letters: gather, wait, compute; what is computed in a row is one letter."""
    letters = {Kind.GATHER: "g", Kind.WAIT: "w", Kind.COMPUTE: "c", Kind.FREE: ""}
    text = "".join(letters[op.kind] for op in timeline.ops)
    while "cc" in text:
        text = text.replace("cc", "c")
    return text


def eager(case: Case, world_size: int) -> tuple[list[Tensor], nn.Module]:
    """Each rank's last output, and the model with the mean gradients of the last step."""
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
    plan = make_plan(model, case.policy, len(ranks), 0)
    for result, y in zip(ranks, outputs, strict=True):
        assert error(result["y"], y) < tolerance
    for param in plan.params:
        found = whole([result["grads"][param.path] for result in ranks], param.shape, sharded=param.sharded)
        grad = model.get_parameter(param.path).grad
        assert grad is not None
        assert error(found, grad) < tolerance, param.path


CASES = (
    Case(Patterns, TEXTBOOK),
    Case(Patterns, replace(TEXTBOOK, gather_per_unit=True)),
    Case(Patterns, TEXTBOOK, autocast=True),
    Case(Patterns, tz.ZERO2),
    Case(Patterns, tz.ZERO2, autocast=True),
    Case(Patterns, tz.ZERO3),
)
NAMES = ("zero3", "zero3-regather", "zero3-autocast", "zero2", "zero2-autocast", "zero3-keep-last")


@pytest.fixture(scope="module")
def results(ranks_pool: RanksPool) -> list[list[dict[str, Any]]]:
    """Of each rank, for each case. The rows of most parameters are padded: 3 divides 9, not 8, 11, 29 or 5."""
    return ranks_pool.run(3, live, CASES, timeout=110)


@pytest.mark.parametrize("at", range(len(CASES)), ids=NAMES)
def test_training_equals_eager(results: list[list[dict[str, Any]]], at: int) -> None:
    check_numbers([rank[at] for rank in results], CASES[at])


# Autocast to bfloat16 makes ZeRO-2 keep the casts, and free the float32 that they are made of; all but the weight
# norm's factors, which its gradient reads in float32.
KEPT_BY_ZERO2 = {False: PATTERNS_AGAIN, True: {"v", "g"}}
# Whole units, the last three of forward: one computes and two are under way at the peak.
KEPT_BY_ZERO3 = {"w", "v", "g", "bias", "layers.2.weight", "layers.2.bias", "layers.1.weight", "layers.1.bias"}


@pytest.mark.parametrize("at", range(len(CASES)), ids=NAMES)
def test_what_is_alive(results: list[list[dict[str, Any]]], at: int) -> None:
    case = CASES[at]
    for rank in results:
        result = rank[at]
        listed = set(result["listed as kept"])
        assert case.policy.stage == 2 or listed == (KEPT_BY_ZERO3 if case.policy.gather_last_units_once else set())
        # What backward does not read (biases) is gone.
        kept = listed & PATTERNS_AGAIN if case.policy.stage == 3 else KEPT_BY_ZERO2[case.autocast]
        assert result["after forward"] == kept
        assert result["after backward"] == result["after inference"] == set()
        assert result["again"] == (PATTERNS_AGAIN - kept if case.policy.stage == 3 else set())
        assert bool(result["saved of parameters"]) == bool(kept)
        assert bool(kept) == (case.policy.stage == 2 or case.policy.gather_last_units_once)
        if case.policy.stage == 2 and case.autocast:
            assert result["peak"] <= result["planned peak"]
        else:
            assert result["peak"] == result["planned peak"]
        last = result["at reductions"][-1][1]  # when the last gradients leave, the layers' weights are gone
        assert {path for path in last if path.startswith("layers")} <= {"layers.0.weight"}


def test_peaks_of_the_stages(results: list[list[dict[str, Any]]]) -> None:
    """ZeRO-3 takes less than ZeRO-2, and no more where it keeps the last units."""
    model = sum(param.numel() * 4 for param in fresh(Patterns).parameters())
    for rank in results:
        peak = {name: result["peak"] for name, result in zip(NAMES, rank, strict=True)}
        assert peak["zero3-regather"] <= peak["zero3"] < peak["zero2"] <= model
        assert peak["zero3-keep-last"] == peak["zero3"]


@pytest.fixture(scope="module")
def fused(ranks_pool: RanksPool) -> list[list[dict[str, Any]]]:
    """Of two ranks, for each of FUSED."""
    return ranks_pool.run(2, live, FUSED, timeout=380)


FUSED = (
    Case(Mlp, replace(TEXTBOOK, prefetch=1)),
    Case(Mlp, replace(TEXTBOOK, prefetch=1), fused=True),
    Case(Mlp, replace(tz.ZERO3, prefetch=1), fused=True),
    Case(Patterns, TEXTBOOK, fused=True),
)


@pytest.mark.timeout(400)  # when the cache of torch's compiler is cold
@pytest.mark.parametrize("at", range(len(FUSED)), ids=["mlp", "mlp-fused", "mlp-fused-keep-last", "patterns-fused"])
def test_a_fusing_executor_keeps_the_stage(fused: list[list[dict[str, Any]]], at: int) -> None:
    """With torch_compile, what is between two gathers becomes a region; the gathers stay where they are without it."""
    case = FUSED[at]
    check_numbers([rank[at] for rank in fused], case)
    for rank in fused:
        result = rank[at]
        kept = {"layers.1.weight", "layers.2.weight"} if case.policy.gather_last_units_once else set()
        assert result["after forward"] == kept
        assert result["after backward"] == result["after inference"] == set()
        assert result["peak"] == result["planned peak"]
        assert len(result["saved of parameters"]) == len(kept)
        if case.kind is Mlp:  # three layers; each is gathered while the one before computes
            assert result["spread"] == "gwgcwgcwc"
            assert result["fused regions"] == (3 if case.fused else 0)
            assert result["again"] == {"layers.1.weight", "layers.2.weight"} - kept  # the input needs no gradient
            assert result["in flight"] == 8 * 7 * 4  # one layer of 7 x 7 + 7
            assert result["peak"] == 2 * 8 * 7 * 4
        else:  # the embeddings, three layers, the rest
            assert result["spread"] == "gwggcwgcwgcwcwc"
            assert result["fused regions"] == 5
            assert result["again"] == PATTERNS_AGAIN

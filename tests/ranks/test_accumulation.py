"""Gradient accumulation both ways: reduced in each backward, and deferred by ``no_sync`` until the last one."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import count_sends, error, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier, only
from thunder_zero.runtime.sharded_model import sharded_model

BOTH_FRONT_ENDS = True

STAGES = (0, 1, 2, 3)
MICRO, ROWS, STEPS = 3, 6, 4  # micro-batches of a step, rows of one over all ranks, steps
WAYS = ("reduced", "deferred", "mixed")
POLICIES = {f"stage {stage}": tz.Policy(stage=stage, gather_last_units_once=False) for stage in STAGES}
POLICIES["stage 2 held"] = replace(tz.ZERO2, gather_once_per_accumulation=True)
POLICIES = only(("stage 3", "stage 2 held"), POLICIES)


class Paths(nn.Module):
    """Five rows and a scalar in all micro-batches; one layer in the first alone, one in the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 5)
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, path: str) -> Tensor:
        x = torch.tanh(self.shared(x)) * self.scale
        if path == "first":
            x = self.first(x)
        if path == "last":
            x = self.last(x)
        return x


PATHS = ("first", "neither", "last")


def inputs(step: int, micro: int, rank: int, world_size: int) -> Tensor:
    """This rank's rows of one micro-batch."""
    generator = torch.Generator().manual_seed(step * MICRO + micro)
    return torch.randn(ROWS, 4, generator=generator).tensor_split(world_size)[rank]


def is_deferred(way: str, micro: int) -> bool:
    """Whether a micro-batch runs under ``no_sync``: all but the last, or ("mixed") the second alone."""
    return micro < MICRO - 1 and (way == "deferred" or (way == "mixed" and micro == 1))


def deferred_bytes(model: Any) -> int:
    return sum(grad.nbytes for grad in sharded_model(model).state.accumulation._deferred.values())


def train(model: Any, way: str, rank: int, world_size: int) -> list[dict[str, Any]]:
    """Some steps; for each micro-batch the bytes sent, the bytes deferred after it, and the gradient of its input."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro, path in enumerate(PATHS):
            x = inputs(step, micro, rank, world_size).requires_grad_()
            with model.no_sync() if is_deferred(way, micro) else nullcontext(), count_sends() as sent:
                (model(x, path).square().mean() / MICRO).backward()
            deferred = deferred_bytes(model) if isinstance(model, tz.ZeroModule) else 0
            seen.append({"step": step, "micro": micro, "sent": sum(sent), "deferred": deferred, "grad": x.grad})
        optimizer.step()
    return seen


def run(rank: int, world_size: int) -> dict[tuple[str, str], Any]:
    results = {}
    for name, policy in POLICIES.items():
        plain = fresh(Paths)
        model = sharded(plain, policy)
        for way in WAYS:
            model.load_original_state_dict(fresh(Paths).state_dict())
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*no_sync.*|.*No op.*")
                seen = train(model, way, rank, world_size)
            results[name, way] = seen, tz.full_state_dict(model), tz.traces_of(model).plan
    return results


def run_eager(rank: int, world_size: int) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    model = fresh(Paths)
    return train(model, "reduced", 0, 1), model.state_dict()


@pytest.fixture(scope="module")
def ranks(ranks_pool: RanksPool) -> list[dict[tuple[str, str], Any]]:
    return ranks_pool.run(3, run, timeout=110)


@pytest.fixture(scope="module")
def eager(ranks_pool: RanksPool) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    (result,) = ranks_pool.run(1, run_eager)
    return result


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("way", WAYS)
def test_both_ways_train_as_one_process(ranks: Any, eager: Any, name: str, way: str) -> None:
    """Parameters that only the first micro-batch, or only the last one, reaches, and the gradients of inputs too."""
    seen, weights = eager
    for results in ranks:
        assert results[name, way][1].keys() == weights.keys()
        for path, weight in weights.items():
            assert error(results[name, way][1][path], weight) < 1e-5, path
    for number, right in enumerate(seen):
        found = torch.cat([results[name, way][0][number]["grad"] for results in ranks]) / len(ranks)
        assert error(found, right["grad"]) < 1e-5, number


@pytest.mark.parametrize("name", POLICIES)
def test_deferred_gradients_are_sent_once(ranks: Any, name: str) -> None:
    """Under no_sync a micro-batch gathers and does not reduce; the last one reduces every gradient of any of them."""
    plan = ranks[0][name, "deferred"][2]
    reached = [
        sum(param.full_bytes for param in plan.params if not param.path.startswith(others))
        for others in (("last",), ("last",), ("first", "last"))
    ]
    common, first = reached[2], reached[0] - reached[2]
    each = 1 if ranks[0][name, "deferred"][2].policy.stage else 2  # times W - 1: what all ranks send to reduce a byte
    scalar = 4 * (2 - each)  # is all-reduced in all stages
    for step in range(1, STEPS):
        deferred, reduced = (
            [total(ranks, name, way, step * MICRO + micro, "sent") for micro in range(MICRO)]
            for way in ("deferred", "reduced")
        )
        spared = [held - plain for plain, held in zip(reduced, deferred, strict=True)]
        gathers = gathered(plan, len(ranks)) if "held" in name else 0
        per_byte = each * (len(ranks) - 1)
        assert spared[0] == -(per_byte * (common + first) + scalar * (len(ranks) - 1))
        assert spared[1] == -(per_byte * common + scalar * (len(ranks) - 1)) - gathers
        assert spared[2] == per_byte * first - gathers, "the last one reduces what only the first has reached"
        for result in ranks:
            seen = result[name, "deferred"][0][step * MICRO : (step + 1) * MICRO]
            assert [micro["deferred"] for micro in seen] == [reached[0], reached[1], 0]
            assert not any(micro["deferred"] for micro in result[name, "reduced"][0])


def total(ranks: Any, name: str, way: str, number: int, what: str) -> int:
    return sum(result[name, way][0][number][what] for result in ranks)


def gathered(plan: Any, world_size: int) -> int:
    """Bytes that all ranks send to gather the layer that all micro-batches read."""
    return (world_size - 1) * sum(param.full_bytes for param in plan.params if param.path.startswith("shared"))


def changed_between(rank: int, world_size: int) -> list[Tensor]:
    """Between two micro-batches all weights are doubled in place, and no optimizer hook runs."""
    outputs = []
    for policy in (tz.ZERO2, POLICIES["stage 2 held"]):
        model = sharded(fresh(Paths), policy)
        x = inputs(0, 0, rank, world_size)
        with model.no_sync():
            model(x, "first").sum().backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(2)
            outputs.append(model(x, "first").detach())
    return outputs


def test_held_over_parameters_are_gathered_again_when_they_changed(ranks_pool: RanksPool) -> None:
    for plain, holding in ranks_pool.run(2, changed_between):
        assert torch.equal(plain, holding)


# Ranks that differ


def reaches(rank: int, world_size: int) -> dict[str, Tensor | None]:
    """Under no_sync rank 0 reaches one layer and rank 1 another; the last micro-batch reaches neither."""
    model = sharded(fresh(Paths), tz.DDP)
    x = torch.ones(2, 4)
    with model.no_sync():
        model(x, PATHS[2 * rank]).sum().backward()
    model(x, "neither").sum().backward()
    return {name: param.grad for name, param in model.named_parameters()}


def test_a_gradient_deferred_on_one_rank_is_reduced_by_all(ranks_pool: RanksPool) -> None:
    """DDP has no collective under no_sync, so that ranks may differ there."""
    ranks = ranks_pool.run(2, reaches)
    right = fresh(Paths)
    for path in PATHS[::2]:
        right(torch.ones(2, 4), path).sum().backward()
        right(torch.ones(2, 4), "neither").sum().backward()
    for name, param in right.named_parameters():
        for grads in ranks:
            found = grads[name]
            assert found is not None
            assert param.grad is not None
            assert error(found, param.grad / 2) < 1e-5, name


def differ(rank: int, world_size: int) -> str:
    """Rank 0 evaluates, rank 1 trains: in ZeRO-3 both forwards have the same lines."""
    model = sharded(fresh(Paths), tz.Policy(stage=3, gather_last_units_once=False))
    try:
        with torch.no_grad() if rank == 0 else nullcontext():
            model(torch.ones(2, 4), "first").sum()
    except RuntimeError as failure:
        return str(failure)
    return "nothing"


def test_ranks_that_run_different_programs_hear_of_it(ranks_pool: RanksPool) -> None:
    for told in ranks_pool.run(2, differ):
        told = told.replace("of graph 0 ", "")  # dynamo's
        assert "rank 0 is in the first forward without backward of model" in told
        assert "rank 1 is in the first forward of model" in told


def not_a_number(rank: int, world_size: int) -> dict[str, Any]:
    """A layer that only the first micro-batch reaches gets NaN on rank 1; then a clean accumulation."""
    model = sharded(fresh(Paths), tz.Policy(stage=2, check_gradients=True))
    told: dict[str, Any] = {}
    for bad in (True, False):
        x = torch.full((2, 4), float("nan")) if bad and rank == 1 else torch.ones(2, 4)
        try:
            with model.no_sync():
                model(x, "first").sum().backward()
            model(torch.ones(2, 4), "neither").sum().backward()
        except RuntimeError as failure:
            told["refused"] = str(failure)
        told[f"deferred {bad}"] = deferred_bytes(model)
    told["finite"] = all(param.grad.isfinite().all() for param in model.parameters() if param.grad is not None)
    return told


def test_a_deferred_nan_is_found_and_not_added_later(ranks_pool: RanksPool) -> None:
    for told in ranks_pool.run(2, not_a_number):
        assert "NaN or Inf" in told["refused"]
        assert "the gradients that no_sync deferred are dropped" in told["refused"]
        assert told["deferred True"] == told["deferred False"] == 0
        assert told["finite"]


# Misuse


def misuse(rank: int, world_size: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for policy in POLICIES.values():
        model = sharded(fresh(Paths), policy)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        with model.no_sync():
            model(torch.ones(2, 4), "first").sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            told["open"] = str(error)
        told["unchanged"] = all(torch.equal(param, before[name]) for name, param in model.named_parameters())
        told["no gradient"] = all(param.grad is None for param in model.parameters())
        told["dropped by optimizers"] = dropped_by_optimizers(model)
        with model.no_sync():
            model(torch.ones(2, 4), "first").sum().backward()
        model.zero_grad()
        told["dropped"] = deferred_bytes(model)
        model(torch.ones(2, 4), "neither").sum().backward()
        told["first"] = model.get_parameter("first.weight").grad
        optimizer.step()
        try:
            with model.no_sync():
                raise KeyError("a failure")
        except KeyError:
            told["synced again"] = sharded_model(model).state.accumulation.synced
    return told


def dropped_by_optimizers(model: tz.ZeroModule) -> list[Any]:
    """The paths whose gradients are deferred still, and those with a gradient, after ``zero_grad`` of optimizers that
    have no, one and then all parameters of the model; of the last, with zeros instead of None."""
    found: list[Any] = []
    first = model.get_parameter("first.weight")
    for params, set_to_none in (([nn.Parameter(torch.ones(2))], True), ([first], True), (model.parameters(), False)):
        with torch.profiler.record_function("a range of the user's"):
            torch.optim.AdamW(params).zero_grad(set_to_none)
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        found.append((sorted(sharded_model(model).state.accumulation.paths), sorted(grads)))
    found.append(sum(int(grad.count_nonzero()) for grad in grads.values()))
    model.zero_grad()
    return found


def test_an_accumulation_that_is_left_open_is_refused_and_can_be_dropped(ranks_pool: RanksPool) -> None:
    for told in ranks_pool.run(2, misuse):
        for words in (
            "AdamW cannot step: no_sync still holds",
            "'first.bias'",
            "outside of no_sync",
            "model.zero_grad()",
        ):
            assert words in told["open"]
        assert told["unchanged"]
        assert told["no gradient"]
        rest = ["first.bias", "scale", "shared.bias", "shared.weight"]
        deferred = sorted([*rest, "first.weight"])
        assert told["dropped by optimizers"] == [(deferred, []), (rest, []), ([], rest), 0]
        assert told["dropped"] == 0
        assert told["first"] is None
        assert told["synced again"]


# Hooks, and gradients that nobody accumulates


def gradient(model: Any, x: Tensor, wanted: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x, "first").sum(), wanted)


def hooked(rank: int, world_size: int, policies: tuple[tz.Policy, ...]) -> list[dict[str, Any]]:
    """The hooks that run in each micro-batch, and the gradient that each of them sees."""
    results = []
    for policy in policies:
        model = sharded(fresh(Paths), policy)
        fired: list[tuple[str, str, Tensor | None]] = []

        def note(kind: str, name: str, grad: Tensor | None, fired: Any = fired) -> None:
            fired.append((kind, name, None if grad is None else grad.clone()))

        for name, param in model.named_parameters():
            param.register_hook(lambda grad, name=name: note("before", name, grad))
            param.register_post_accumulate_grad_hook(lambda param, name=name: note("after", name, param.grad))
        seen = []
        for micro, path in enumerate(PATHS):
            with model.no_sync() if micro < MICRO - 1 else nullcontext():
                model(inputs(0, micro, rank, world_size), path).square().mean().backward()
            seen.append(fired[:])
            fired.clear()
        grads = {name: param.grad for name, param in model.named_parameters()}
        refusals = []
        x = inputs(0, 0, rank, world_size).requires_grad_()
        with model.no_sync():
            model(x, "first").square().mean().backward()
            refusals.append(raised(partial(gradient, model, x, x)))
        params = [param for name, param in model.named_parameters() if not name.startswith("last")]
        refusals.append(raised(partial(model(x, "first").sum().backward, inputs=[x])))
        refusals.append(raised(partial(gradient, model, x, params)))
        model.zero_grad()
        asked = gradient(model, x, params)
        model(x, "first").sum().backward()
        right = [param.grad for param in params]
        results.append({"seen": seen, "grads": grads, "refusals": refusals, "asked": asked, "right": right})
    return results


def test_hooks_run_once_when_a_gradient_is_reduced(ranks_pool: RanksPool) -> None:
    """So do FSDP2's. torch.autograd.grad works, but not where it would add to an accumulation or lose a part of it."""
    stages = of_tier((3,), STAGES)
    for results in ranks_pool.run(2, hooked, tuple(tz.Policy(stage=stage) for stage in stages), timeout=110):
        for result in results:
            assert result["seen"][:-1] == [[], []]
            for kind in ("before", "after"):
                found = {name: grad for what, name, grad in result["seen"][-1] if what == kind}
                assert found.keys() == result["grads"].keys()
                for name, grad in found.items():
                    assert torch.equal(grad, result["grads"][name]), (kind, name)
            assert len(result["seen"][-1]) == 2 * len(result["grads"])
            for refusal in result["refusals"]:
                assert "in the middle of an accumulation: no_sync defers" in refusal
                assert "; call it outside of no_sync" in refusal
            for found, right in zip(result["asked"], result["right"], strict=True):
                assert torch.equal(found, right)

"""Unusual models and training loops: each case against eager, on several ranks.

The reference is one eager copy a rank, trained on that rank's rows, with the mean of the copies' gradients.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import ZOO_WITHOUT_GRAD, Mlp, Tensors, Zoo, error, fresh, sharded, storages, whole
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.comm.pairwise import Exchange
from thunder_zero.plan import make_plan
from thunder_zero.schedule.timeline import Kind

import thunder

BOTH_FRONT_ENDS = True

STAGES = of_tier((1, 3), (0, 1, 2, 3))  # test_training has all
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
ROWS = 4  # of each rank's batch


def rows_of(rank: int, width: int, step: int = 0) -> Tensor:
    """A rank's batch of one step, the same in every process: (ROWS, width)."""
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_grads(copies: list[nn.Module]) -> dict[str, Tensor | None]:
    """The mean of the copies' gradients, in float32, added up in rank order."""
    means: dict[str, Tensor | None] = {}
    for name, param in copies[0].named_parameters():
        if param.grad is None:
            means[name] = None
            continue
        grads = [copy.get_parameter(name).grad.float() for copy in copies]
        means[name] = (sum(grads, torch.zeros(())) / len(copies)).to(param.dtype)
    return means


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def compare_grads(ranks: list[dict[str, Tensor | None]], right: dict[str, Tensor | None], plan: tz.Plan) -> None:
    """All ranks' gradients of all parameters, joined, against full ones."""
    assert ranks[0].keys() == right.keys()
    for name, expected in right.items():
        parts = [grads[name] for grads in ranks]
        if expected is None:
            assert parts == [None] * len(ranks), name
            continue
        param = plan.by_name[name]
        assert all(part is not None and tuple(part.shape) == plan.shard_shape(param) for part in parts), name
        found = whole([part for part in parts if part is not None], param.shape, sharded=param.sharded)
        assert error(found, expected) < TOLERANCE[expected.dtype], name


# Every kind of parameter


def step_zoo(rank: int, world_size: int, policies: tuple[tz.Policy, ...]) -> list[dict[str, Any]]:
    """One forward and backward under each policy."""
    results = []
    for policy in policies:
        model = sharded(fresh(Zoo), policy)
        x = rows_of(rank, 9).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        timeline = tz.traces_of(model).timeline
        moved = {kind: [path for op in timeline.ops if op.kind is kind for path in op.params] for kind in Kind}
        full = tz.full_state_dict(model)
        results.append({"y": y.detach(), "x": x.grad, "grads": grads_of(model), "full": full, "moved": moved})
    return results


def test_every_kind_of_parameter(ranks_pool: RanksPool) -> None:
    world_size = 3
    each_unit = replace(tz.ZERO3, gather_per_unit=True, bucket_bytes=0)
    policies = of_tier((tz.DDP, tz.ZERO1, each_unit), (tz.DDP, tz.ZERO1, tz.ZERO2, tz.ZERO3, each_unit))
    ranks = ranks_pool.run(world_size, step_zoo, policies, timeout=110)
    copies = [fresh(Zoo) for _ in range(world_size)]
    inputs = [rows_of(rank, 9).requires_grad_() for rank in range(world_size)]
    outputs = [copy(x) for copy, x in zip(copies, inputs, strict=True)]
    for y in outputs:
        y.square().mean().backward()
    right = mean_grads(copies)
    assert {name for name, grad in right.items() if grad is None} == ZOO_WITHOUT_GRAD
    for at, policy in enumerate(policies):
        plan = make_plan(fresh(Zoo), policy, world_size, 0)
        compare_grads([results[at]["grads"] for results in ranks], right, plan)
        for copy, x, y, results in zip(copies, inputs, outputs, ranks, strict=True):
            assert error(results[at]["y"], y.detach()) < TOLERANCE[torch.float32]
            assert x.grad is not None
            assert error(results[at]["x"], x.grad) < TOLERANCE[torch.float32]
            compare_state(results[at]["full"], copy.state_dict())
        moved = ranks[0][at]["moved"]
        assert sorted(moved[Kind.REDUCE]) == sorted(right.keys() - ZOO_WITHOUT_GRAD)
        # In both halves together; ZeRO-3 keeps its unit, one of the last, gathered for backward.
        tied_gathers = 0 if policy.stage == 0 else 3 if policy.gather_per_unit else 1
        assert moved[Kind.GATHER].count("layers.0.weight") == tied_gathers


def compare_state(found: Tensors, right: Tensors) -> None:
    """A gathered state dict: parameters bit for bit (there was no step), buffers (BatchNorm's changed) nearly."""
    assert list(found) == list(right)
    for name, expected in right.items():
        if name.startswith("norm.running"):
            assert error(found[name], expected) < TOLERANCE[torch.float32], name
        else:
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected), name


# State dicts


def load_and_save(rank: int, world_size: int) -> list[dict[str, Any]]:
    """A model sharded from other weights takes the plain module's, forwards with them, and gives them back."""
    results = []
    plain = fresh(Zoo)
    torch.manual_seed(1)
    other = Zoo()
    for stage in STAGES:
        model = sharded(other, stage)
        with torch.no_grad():
            model(rows_of(rank, 9))  # ZeRO-1's buffers are fresh, and must become stale
        model.load_original_state_dict(plain.state_dict())
        model.eval()
        with torch.no_grad():
            y = model(rows_of(rank, 9))
        results.append({"y": y, "full": tz.full_state_dict(model), "tied": len(list(model.parameters()))})
    return results


def test_the_plain_state_dict_goes_in_and_comes_out(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(2, load_and_save, timeout=110)
    plain = fresh(Zoo)
    right = plain.state_dict()
    assert "not_saved" not in right
    assert {"offset", "norm.running_mean", "layers.2.weight", "frozen"} <= right.keys()
    plain.eval()
    for rank, results in enumerate(ranks):
        for result in results:
            assert list(result["full"]) == list(right)
            for name, expected in right.items():
                assert torch.equal(result["full"][name], expected), name
            assert error(result["y"], plain(rows_of(rank, 9)).detach()) < TOLERANCE[torch.float32]
            assert result["tied"] == len(list(plain.parameters()))


# Loops


def pending_forwards(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Three forwards, then their backwards in another order; a forward under no_grad in between."""
    results = []
    for stage in STAGES:
        model = sharded(fresh(Mlp), stage)
        losses = [model(rows_of(rank, 7, step)).square().mean() for step in range(3)]
        with torch.no_grad():
            model(rows_of(rank, 7, 9))
        for at in (1, 0, 2):
            losses[at].backward()
        results.append(grads_of(model))
    return results


def test_several_forwards_before_their_backwards(ranks_pool: RanksPool) -> None:
    world_size = 3
    ranks = ranks_pool.run(world_size, pending_forwards, timeout=110)
    copies = [fresh(Mlp) for _ in range(world_size)]
    for rank, copy in enumerate(copies):
        for step in range(3):
            copy(rows_of(rank, 7, step)).square().mean().backward()
    for stage in STAGES:
        plan = make_plan(copies[0], tz.Policy(stage=stage), world_size, 0)
        compare_grads([results[STAGES.index(stage)] for results in ranks], mean_grads(copies), plan)


class Dropping(nn.Module):
    """Dropout and BatchNorm: eval() is another program. (Dropout of probability 0 keeps the numbers.)"""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm, self.drop = Mlp(layers=2), nn.BatchNorm1d(7), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.drop(self.norm(x)))


def train_with_breaks(model: Any) -> list[Tensor]:
    """Inference before the first step and between all steps; every output. All ranks have the same rows."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    outputs = []
    for step in range(3):
        model.eval()
        with torch.inference_mode():
            inferred = model(rows_of(0, 7, 10 + step))
        outputs.append(inferred.clone())
        with torch.no_grad():
            outputs.append(model(rows_of(0, 7, 20 + step)))
        model.train()
        optimizer.zero_grad()
        y = model(rows_of(0, 7, step))
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs


def interrupted_training(rank: int, world_size: int) -> list[Any]:
    results = []
    for stage in STAGES:
        model = sharded(fresh(Dropping), stage)
        outputs = train_with_breaks(model)
        results.append((outputs, tz.full_state_dict(model), thunder.cache_misses(model)))
    return results


def test_inference_between_training_steps(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(2, interrupted_training, timeout=110)
    eager = fresh(Dropping)
    right = [output.detach() for output in train_with_breaks(eager)]
    for results in ranks:
        for outputs, full, misses in results:
            for found, expected in zip(outputs, right, strict=True):
                assert error(found, expected) < 1e-5
            for name, expected in eager.state_dict().items():
                assert error(full[name].double(), expected.double()) < 1e-5, name
            assert misses <= 3  # inference, no_grad, training


# Failures


class Failure(Exception):
    """Raised by the tests in the middle of a step, on every rank."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Failure


def failing(name: str, count: int) -> Any:
    """Inside of the block the transport's method fails the ``count``-th time that it is called."""
    method, calls = getattr(Exchange, name), itertools.count(1)
    return mock.patch.object(
        Exchange, name, lambda *args, **kwargs: fail() if next(calls) == count else method(*args, **kwargs)
    )


def fails_in_loss(model: Any, x: Tensor) -> None:
    model(x)
    raise Failure


def fails_in_hook(model: Any, x: Tensor) -> None:
    """The second call's backward has run, the first one's has not."""
    y = model(x)
    y.register_hook(fail)
    model(torch.tanh(y)).square().mean().backward()


def fails_at_second_gather(model: Any, x: Tensor) -> None:
    with failing("all_gather", 2):
        model(x).square().mean().backward()
    raise Failure  # stage 0 gathers nothing


def fails_at_last_reduction(model: Any, x: Tensor) -> None:
    """Two buckets are under way."""
    with failing("all_reduce", 3), failing("reduce_scatter", 3):
        model(x).square().mean().backward()


FAILURES = (fails_in_loss, fails_in_hook, fails_at_second_gather, fails_at_last_reduction)


def train_with_failures(model: Any, optimizer: Any, rank: int) -> list[tuple[Tensor, dict[str, Tensor | None], int]]:
    """After each failure a clean step: its output, its gradients, and the bytes held after it."""
    steps = []
    for step, failure in enumerate(FAILURES):
        try:
            failure(model, rows_of(rank, 7, 50 + step))
        except Failure:
            pass
        else:
            raise AssertionError(f"{failure.__name__} did not fail")
        optimizer.zero_grad()
        y = model(rows_of(rank, 7, step))
        y.square().mean().backward()
        optimizer.step()
        steps.append((y.detach(), grads_of(model), sum(storages().values())))
    return steps


def recover(rank: int, world_size: int) -> list[Any]:
    results = []
    for stage in STAGES:
        model = sharded(fresh(Mlp), stage)
        results.append(train_with_failures(model, torch.optim.SGD(model.parameters(), 0.1), rank))
    return results


def test_a_clean_step_after_a_failure(ranks_pool: RanksPool) -> None:
    world_size = 2
    ranks = ranks_pool.run(world_size, recover, timeout=110)
    copies = [fresh(Mlp) for _ in range(world_size)]
    for result in (result for rank in ranks for result in rank):
        held = [nbytes for _, _, nbytes in result]
        # From step to step this grows by the results that the test keeps; a failed step leaves nothing under way.
        assert len({after - before for before, after in itertools.pairwise(held)}) == 1
    for step, failure in enumerate(FAILURES):
        outputs = [copy(rows_of(rank, 7, step)) for rank, copy in enumerate(copies)]
        for y, copy in zip(outputs, copies, strict=True):
            copy.zero_grad()
            y.square().mean().backward()
        right = mean_grads(copies)
        for stage in STAGES:
            where = f"stage {stage}, after {failure.__name__}"
            for rank, y in enumerate(outputs):
                assert error(ranks[rank][STAGES.index(stage)][step][0], y.detach()) < 1e-5, where
            plan = make_plan(fresh(Mlp), tz.Policy(stage=stage), world_size, 0)
            compare_grads([results[STAGES.index(stage)][step][1] for results in ranks], right, plan)
        for copy in copies:
            for name, param in copy.named_parameters():
                param.data -= 0.1 * right[name]


# Numbers


class Scaled(nn.Module):
    """The gradient of each element of ``w`` is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def large_gradients(rank: int, world_size: int) -> list[Tensor]:
    """Each rank's gradient is 40,000 (+ 32 a rank); two of them do not fit in float16, which ends at 65,504."""
    grads = []
    for stage in STAGES:
        model = sharded(fresh(Scaled), stage)
        model(torch.tensor(40000.0 + 32 * rank, dtype=torch.float16)).backward()
        (param,) = model.parameters()
        grads.append(param.grad.clone())
    return grads


def test_sums_beyond_float16_have_their_mean(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(2, large_gradients)
    mean = 40000.0 + 16
    right = torch.full((5,), mean).half()
    assert right.isfinite().all()
    assert float(right[0]) * 2 > torch.finfo(torch.float16).max
    for stage in STAGES:
        found = whole([grads[STAGES.index(stage)] for grads in ranks], (5,), sharded=stage > 0)
        assert torch.equal(found, right), stage


class Scale(nn.Module):
    """A 0-dim factor of everything: Thunder returns its gradient in the shape of the batch, not summed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.linear = nn.Parameter(torch.tensor(0.5)), nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


def uneven_rows(rank: int, world_size: int) -> list[dict[str, Tensor | None]]:
    """Rank 0 has one row, rank 1 two, rank 2 three."""
    grads = []
    for stage in STAGES:
        model = sharded(fresh(Scale), stage)
        model(rows_of(rank, 7)[: rank + 1]).square().mean().backward()
        grads.append(grads_of(model))
    return grads


def test_ranks_may_have_batches_of_different_sizes(ranks_pool: RanksPool) -> None:
    world_size = 3
    ranks = ranks_pool.run(world_size, uneven_rows)
    copies = [fresh(Scale) for _ in range(world_size)]
    for rank, copy in enumerate(copies):
        copy(rows_of(rank, 7)[: rank + 1]).square().mean().backward()
    for stage in STAGES:
        plan = make_plan(copies[0], tz.Policy(stage=stage), world_size, 0)
        compare_grads([results[STAGES.index(stage)] for results in ranks], mean_grads(copies), plan)


def step_in_part(rank: int, world_size: int, members: list[int]) -> list[dict[str, Tensor | None]]:
    group = dist.new_group(members)
    grads = []
    for stage in STAGES if rank in members else ():
        model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(stage=stage, process_group=group)])
        model(rows_of(rank, 7)).square().mean().backward()
        grads.append(grads_of(model))
    return grads


def test_gradients_are_means_over_the_group_alone(ranks_pool: RanksPool) -> None:
    """Ranks 1 and 2 of three share a model; rank 0 and its batch take no part."""
    members = [1, 2]
    ranks = ranks_pool.run(3, step_in_part, members)
    copies = [fresh(Mlp) for _ in members]
    for rank, copy in zip(members, copies, strict=True):
        copy(rows_of(rank, 7)).square().mean().backward()
    assert ranks[0] == []
    for stage in STAGES:
        plan = make_plan(copies[0], tz.Policy(stage=stage), len(members), 0)
        compare_grads([ranks[rank][STAGES.index(stage)] for rank in members], mean_grads(copies), plan)


class TwoHeads(nn.Module):
    """Two outputs; a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.used, self.left_out = nn.Linear(7, 7), nn.Linear(7, 3), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return self.used(x), self.left_out(x)


def one_head(rank: int, world_size: int) -> list[dict[str, Tensor | None]]:
    """Each rank leaves the second head out of its loss; then rank 1 alone does."""
    grads = []
    for stage in (0, 1, 2, 3):
        model = sharded(fresh(TwoHeads), stage)
        for is_left_out in (True, rank == 1):
            model.zero_grad()
            used, left_out = model(rows_of(rank, 7))
            (used if is_left_out else used + left_out).square().mean().backward()
            grads.append(grads_of(model))
    return grads


@pytest.mark.slow
def test_an_output_that_the_loss_leaves_out_has_zero_gradients_in_all_stages(ranks_pool: RanksPool) -> None:
    """Eager has None. One compiled backward serves all losses, and a rank may leave out what another one uses."""
    ranks = ranks_pool.run(2, one_head, timeout=110)
    for at, is_left_out in enumerate((True, False)):
        copies = [fresh(TwoHeads) for _ in range(2)]
        for rank, copy in enumerate(copies):
            used, left_out = copy(rows_of(rank, 7))
            (used + left_out * (0 if is_left_out or rank == 1 else 1)).square().mean().backward()
        right = mean_grads(copies)
        assert right["left_out.weight"] is not None
        assert bool(right["left_out.weight"].any()) is not is_left_out
        for stage in (0, 1, 2, 3):
            plan = make_plan(copies[0], tz.Policy(stage=stage), 2, 0)
            compare_grads([results[2 * stage + at] for results in ranks], right, plan)

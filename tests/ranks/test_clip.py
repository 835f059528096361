"""The global norm of gradients, and clipping by it, equal torch's on the unsharded model."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.models import LENGTH, Mlp, Small, fresh, join_rows, relative_error, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local

NORMS, LIMITS = (1.0, 2.0, 3.0, inf), (1e-3, 1e3)
ROWS = 12


def make_tokens() -> Tensor:
    return torch.randint(0, 9, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def clip_by_all_norms(
    rank: int, world_size: int, stages: list[int]
) -> dict[tuple[int, float, float], tuple[Tensor, int, dict[str, Tensor | None]]]:
    """Return by stage, norm and limit: the norm, how many collectives it took, and this rank's clipped gradients."""
    results = {}
    for stage in stages:
        model = sharded(fresh(Small), stage)
        for norm_type in NORMS:
            for limit in LIMITS:
                model.zero_grad()
                model(make_tokens().tensor_split(world_size)[rank]).square().mean().backward()
                with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
                    norm = tz.clip_grad_norm_(model, limit, norm_type)
                grads = {
                    name: None if param.grad is None else local(param.grad) for name, param in model.named_parameters()
                }
                results[stage, norm_type, limit] = norm, calls.call_count, grads
    return results


@pytest.mark.parametrize("stages", [[3], *slow([0, 1, 2])], ids=str)
def test_the_norm_is_torchs_of_one_process(ranks_pool: RanksPool, stages: list[int]) -> None:
    ranks = ranks_pool.run(3, clip_by_all_norms, stages)
    model = fresh(Small)
    for norm_type in NORMS:
        for limit in LIMITS:
            model.zero_grad()
            model(make_tokens()).square().mean().backward()
            norm = clip_grad_norm_(model.parameters(), limit, norm_type)
            for stage in stages:
                results = [by_case[stage, norm_type, limit] for by_case in ranks]
                assert {calls for _, calls, _ in results} == {1}
                assert all(torch.equal(rank_norm, results[0][0]) for rank_norm, _, _ in results), "equal bits"
                assert relative_error(results[0][0], norm) < 1e-5
                largest = max(param.grad.abs().max() for param in model.parameters() if param.grad is not None)
                plan = tz.schedule.make_plan(model, tz.Policy(stage=stage), tz.schedule.Mesh.of(3))
                for name, param in model.named_parameters():
                    parts = [grads[name] for _, _, grads in results]
                    assert_clipped(parts, param, largest, sharded=plan.by_name[name].sharded)


def assert_clipped(parts: list[Tensor | None], expected: nn.Parameter, largest: Tensor, *, sharded: bool) -> None:
    """Check that the ranks' gradients, in rows or in full, equal a parameter's gradient."""
    if expected.grad is None:
        assert parts == [None] * len(parts)
        return
    present = [part for part in parts if part is not None]
    assert len(present) == len(parts)
    full = join_rows(present, expected.shape, sharded=sharded)
    scale = max(expected.grad.abs().max(), largest / 100)  # a key's bias has none, in exact arithmetic
    assert (full - expected.grad).abs().max() <= 1e-5 * scale


def misuse_clipping(rank: int, world_size: int) -> None:
    """Check that a wrong call changes nothing, and that an infinite norm clips gradients to zero."""
    model, x = sharded(fresh(Mlp), 2), torch.ones(3, 7)
    clip = partial(tz.clip_grad_norm_, model)
    fails(lambda: tz.clip_grad_norm_(Mlp(), 1.0), "TypeError", "got Mlp", "expected a sharded model")
    fails(lambda: clip(1.0), "RuntimeError", "nothing to clip", "after backward")
    with model.no_sync():
        model(x).sum().backward()
    deferred = "cannot clip: no_sync", "of parameter 'layers.0.weight'", "last micro-batch"
    fails(lambda: clip(1.0), "RuntimeError", *deferred)
    model(x).sum().backward()
    if rank == 1:
        local(model.get_parameter("layers.1.weight").grad)[0, 0] = inf
    before = {name: local(param.grad).clone() for name, param in model.named_parameters()}
    fails(lambda: clip(-1.0), "ValueError", "max_norm is -1.0")
    fails(lambda: clip(nan), "ValueError", "max_norm is nan")
    fails(lambda: clip(1.0, 0), "ValueError", "norm_type is 0")
    fails(lambda: clip(1.0, error_if_nonfinite=True), "RuntimeError", "is inf", "error_if_nonfinite=False")
    assert all(torch.equal(local(param.grad), before[name]) for name, param in model.named_parameters())
    assert clip(1.0) == inf
    if rank == 1:
        model.zero_grad()
    fails(lambda: clip(1.0), "RuntimeError", "no parameter has a gradient on rank 1", "after backward")


def test_all_ranks_refuse_gradients_that_cannot_be_clipped(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, misuse_clipping)


def clip_by_torch(rank: int, world_size: int) -> None:
    """Clip sharded and replicated parameters together; the ignored parameter is left out."""
    policy = tz.Policy(stage=3, replicate_below_bytes=30, ignored=("layers.1.weight",))
    model, plain, x = sharded(fresh(Mlp), policy), fresh(Mlp), torch.ones(3, 7)
    ignored = "layers.1.weight"
    for module in (model, plain):
        module(x).sum().backward()
    params = [param for name, param in plain.named_parameters() if name != ignored]
    shards = [param for name, param in model.named_parameters() if name != ignored]
    for foreach in (None, False):
        norm, expected_norm = (clip_grad_norm_(group, 0.5, foreach=foreach) for group in (shards, params))
        assert relative_error(norm, expected_norm) < 1e-6, (foreach, norm, expected_norm)
        for sharded_param, param in zip(shards, params, strict=True):
            assert sharded_param.grad is not None
            assert param.grad is not None
            assert relative_error(sharded_param.grad, param.grad) < 1e-6, foreach
    assert relative_error(tz.clip_grad_norm_(model, 1.0), torch.tensor(0.5)) < 1e-5


def test_torchs_own_clipping_is_that_of_one_process(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, clip_by_torch)

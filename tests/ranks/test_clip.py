"""The global norm of gradients, and clipping by it, equal torch's on the unsharded model."""

from __future__ import annotations

from functools import partial
from math import inf, nan
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import LENGTH, Mlp, Small, error, fresh, sharded, whole
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier

BOTH_FRONT_ENDS = True

STAGES, NORMS, LIMITS = of_tier((1, 3), (0, 1, 2, 3)), (1.0, 2.0, 3.0, inf), (1e-3, 1e3)
ROWS = 12


def tokens() -> Tensor:
    return torch.randint(0, 9, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def norms(rank: int, world_size: int) -> dict[tuple[int, float, float], tuple[Tensor, int, dict[str, Tensor | None]]]:
    """By stage, norm and limit: the norm, how many collectives it took, and the clipped gradients of this rank."""
    found = {}
    for stage in STAGES:
        model = sharded(fresh(Small), stage)
        for norm_type in NORMS:
            for limit in LIMITS:
                model.zero_grad()
                model(tokens().tensor_split(world_size)[rank]).square().mean().backward()
                with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as calls:
                    norm = tz.clip_grad_norm_(model, limit, norm_type)
                grads = {name: param.grad for name, param in model.named_parameters()}
                found[stage, norm_type, limit] = norm, calls.call_count, grads
    return found


def test_the_norm_is_torchs_of_one_process(ranks_pool: RanksPool) -> None:
    ranks = ranks_pool.run(3, norms, timeout=110)
    model = fresh(Small)
    for norm_type in NORMS:
        for limit in LIMITS:
            model.zero_grad()
            model(tokens()).square().mean().backward()
            norm = clip_grad_norm_(model.parameters(), limit, norm_type)
            for stage in STAGES:
                found = [results[stage, norm_type, limit] for results in ranks]
                assert {calls for _, calls, _ in found} == {1}
                assert all(torch.equal(one, found[0][0]) for one, _, _ in found), "the same bits on all ranks"
                assert error(found[0][0], norm) < 1e-5
                largest = max(param.grad.abs().max() for param in model.parameters() if param.grad is not None)
                plan = tz.make_plan(model, tz.Policy(stage=stage), 3, 0)
                for name, param in model.named_parameters():
                    parts = [grads[name] for _, _, grads in found]
                    assert_clipped(parts, param, largest, sharded=plan.by_name[name].sharded)


def assert_clipped(parts: list[Tensor | None], right: nn.Parameter, largest: Tensor, *, sharded: bool) -> None:
    """The ranks' gradients are a parameter's, in rows or each in full."""
    if right.grad is None:
        assert parts == [None] * len(parts)
        return
    there = [part for part in parts if part is not None]
    assert len(there) == len(parts)
    full = whole(there, right.shape, sharded=sharded)
    scale = max(right.grad.abs().max(), largest / 100)  # a key's bias has none, in exact arithmetic
    assert (full - right.grad).abs().max() <= 1e-5 * scale


def misuse(rank: int, world_size: int) -> dict[str, Any]:
    model = sharded(fresh(Mlp), 2)
    x = torch.ones(3, 7)
    found: dict[str, Any] = {
        "no model": raised(lambda: tz.clip_grad_norm_(Mlp(), 1.0)),
        "no gradient": raised(lambda: tz.clip_grad_norm_(model, 1.0)),
    }
    with model.no_sync():
        model(x).sum().backward()
    found["open"] = raised(lambda: tz.clip_grad_norm_(model, 1.0))
    model(x).sum().backward()
    found["negative"] = raised(lambda: tz.clip_grad_norm_(model, -1.0))
    found["nan"] = raised(lambda: tz.clip_grad_norm_(model, nan))
    found["norm 0"] = raised(lambda: tz.clip_grad_norm_(model, 1.0, 0))
    if rank == 1:
        model.get_parameter("layers.1.weight").grad[0, 0] = inf
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    found["inf"] = raised(lambda: tz.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    found["unchanged"] = all(torch.equal(param.grad, before[name]) for name, param in model.named_parameters())
    found["went on"] = tz.clip_grad_norm_(model, 1.0).item()
    found |= norms_of_rows(model)
    if rank == 1:
        model.zero_grad()
    found["one without"] = raised(lambda: tz.clip_grad_norm_(model, 1.0))
    return found


def norms_of_rows(model: tz.ZeroModule) -> dict[str, str]:
    """What torch's own functions tell of one rank's rows."""
    shards: list[Tensor] = list(model.parameters())
    grads = [shard.grad for shard in shards if shard.grad is not None]
    kept = [grad.nan_to_num() for grad in grads]
    found = {
        "torch's clip": raised(lambda: clip_grad_norm_(shards, 1.0)),
        "torch's clip, one": raised(lambda: clip_grad_norm_([nn.Parameter(torch.ones(2)), shards[-1]], 1.0, inf)),
        "torch's norm": raised(lambda: get_total_norm(grads)),
        "torch's norms of parameters": raised(lambda: torch._foreach_norm(shards)),
        "on purpose": raised(lambda: get_total_norm([grad.detach() for grad in grads])),
        "others": raised(lambda: clip_grad_norm_(with_gradient(torch.ones(2)), 1.0)),
    }
    return found | {"unclipped": str(all(map(torch.equal, map(torch.nan_to_num, grads), kept)))}


def with_gradient(value: Tensor) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = torch.ones_like(value)
    return param


def words_of_misuse() -> dict[str, list[str]]:
    rows = [
        "RuntimeError: torch.nn.utils.clip_grad_norm_ (or another norm)",
        "rows of parameter",
        "clip_grad_norm_(model",
    ]
    return {
        "no model": ["TypeError", "got Mlp", "jitted with ZeroTransform"],
        "no gradient": ["RuntimeError", "nothing to clip", "after backward"],
        "open": ["RuntimeError", "cannot clip: no_sync", "of parameter 'layers.2.bias'", "last micro-batch"],
        "negative": ["ValueError", "max_norm is -1.0"],
        "nan": ["ValueError", "max_norm is nan"],
        "norm 0": ["ValueError", "norm_type is 0"],
        "one without": ["RuntimeError", "no parameter has a gradient on rank 1", "after backward"],
        "inf": ["RuntimeError", "is inf", "error_if_nonfinite=False"],
        "torch's clip": [*rows, "'layers.0.weight'"],
        "torch's clip, one": [*rows, "'layers.2.bias'"],
        "torch's norm": [*rows, "'layers.0.weight'"],
        "torch's norms of parameters": [*rows, "'layers.0.weight'"],
        "on purpose": ["nothing"],
        "others": ["nothing"],
        "unclipped": ["True"],
    }


@pytest.fixture(scope="module")
def misused(ranks_pool: RanksPool) -> dict[str, Any]:
    first, second = ranks_pool.run(2, misuse)
    assert first == second
    return dict(first)


@pytest.mark.parametrize("case", words_of_misuse())
def test_all_ranks_refuse_gradients_that_cannot_be_clipped(misused: dict[str, Any], case: str) -> None:
    assert [word for word in words_of_misuse()[case] if word not in misused[case]] == [], misused[case]


def test_a_norm_that_is_not_finite_is_refused_before_anything_changes_or_clips_to_nothing(
    misused: dict[str, Any],
) -> None:
    first = misused
    assert first["unchanged"]
    assert first["went on"] == inf


def clipped_by_torch(rank: int, world_size: int) -> dict[str, str]:
    """What torch's function tells of full gradients, and of rows of several models, one of them gone."""
    told = {}
    for name, policy in (
        ("DDP", tz.DDP),
        ("small", tz.Policy(stage=3, replicate_below_bytes=10**6)),
        ("ignored", tz.Policy(stage=3, ignored=("layers.0", "layers.1"))),
        ("rows", tz.Policy(stage=3)),
    ):
        model = sharded(fresh(Mlp), policy)
        model(torch.ones(3, 7)).sum().backward()
        before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        params = list(model.get_submodule("layers.0").parameters()) if name == "ignored" else list(model.parameters())
        told[name] = raised(partial(clip_grad_norm_, params, 1e9))
        tz.clip_grad_norm_(model, inf)
        after = [param.grad for param in model.parameters() if param.grad is not None]
        told["ours " + name] = str(all(map(torch.equal, before, after)))
    told["one at a time"] = raised(partial(clip_grad_norm_, params, 1e9, foreach=False))
    return told


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_clipping_passes_where_gradients_are_full(ranks_pool: RanksPool, world_size: int) -> None:
    """One at a time it is not seen, as the docs say."""
    for told in ranks_pool.run(world_size, clipped_by_torch):
        rows = told.pop("rows")
        assert ("would see this rank's rows of parameter 'layers.0.weight' only" in rows) is (world_size > 1), rows
        assert {value for name, value in told.items() if name.startswith("ours")} == {"True"}, told
        assert {value for name, value in told.items() if not name.startswith("ours")} == {"nothing"}, told

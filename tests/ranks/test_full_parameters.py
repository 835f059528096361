"""``tz.full_parameters``: the plain module computes with real weights, and nothing is left behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.checkpoints import adamw, same, stepped
from tests.harness.errors import raised
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero.runtime.placeholders import Placeholder

BOTH_FRONT_ENDS = True

TOKENS = torch.arange(9)
HALF = tz.MixedPrecision(torch.bfloat16, overrides={"layers.1": tz.MixedPrecision()})
CASES = of_tier((3,), (0, 1, 2, 3))


def model_of(stage: int) -> Any:
    """A model that has taken a step."""
    model = sharded(fresh(Small), tz.Policy(stage, mixed_precision=HALF))
    stepped(model, adamw(model))
    return model


def outputs_inside(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    model = model_of(stage)
    plain, right = fresh(Small), tz.full_state_dict(model)
    plain.load_state_dict(right)
    with tz.full_parameters(model) as module, torch.no_grad():
        inside = module(TOKENS)
        tied = module.head.weight is module.embed.weight
        left = weakref.ref(module.embed.weight)
        called, again = raised(lambda: model(TOKENS)), raised(tz.full_parameters(model).__enter__)
        frozen = module.frozen.requires_grad
        module.row.data += 1  # nobody wants it back
    gc.collect()
    return {
        "equal": torch.equal(inside, plain(TOKENS)),
        "dtype": inside.dtype,
        "tied, frozen": (tied, frozen),
        "left": left(),
        "all placeholders": all(isinstance(param, Placeholder) for param in module.parameters()),
        "called": called,
        "again": again,
        "outside": raised(lambda: module(TOKENS)),
        "changed": same(tz.full_state_dict(model), right),
        "trains": model(TOKENS).isfinite().all().item(),
    }


@pytest.mark.parametrize("stage", CASES)
def test_the_plain_module_computes_with_full_parameters(ranks_pool: RanksPool, stage: int) -> None:
    for result in ranks_pool.run(2, outputs_inside, stage):
        assert result["equal"]
        assert result["dtype"] is torch.float32
        assert result["tied, frozen"] == (True, False)
        assert result["left"] is None
        assert result["all placeholders"]
        assert "(Small) is inside full_parameters; leave that block" in result["called"]
        assert result["again"] == result["called"]
        assert "use the module that thunder_zero.full_parameters(model) gives" in result["outside"]
        assert result["changed"] == []
        assert result["trains"]


def written(rank: int, world_size: int, stage: int) -> tuple[list[str], Tensor, Tensor]:
    """Each rank draws other values; those of rank 0 count. Then a step of ZeRO-1 refreshes what the others own."""
    model = model_of(stage)
    with tz.full_parameters(model, writeback=True) as module, torch.no_grad():
        torch.manual_seed(rank)
        for param in module.parameters():
            param.normal_()
        module.row = nn.Parameter(torch.full_like(module.row, 3.0 + rank))
    plain = fresh(Small)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in plain.parameters():
            param.normal_()
        plain.row.fill_(3.0)
    with tz.full_parameters(model, writeback=True, rank0_only=True) as module, torch.no_grad():
        assert isinstance(module.scale, Placeholder) is (rank != 0)
        if rank == 0:
            module.scale += 1
    last = tz.full_state_dict(model)
    different = same(last, {**plain.state_dict(), "scale": plain.scale.detach() + 1})
    plain.load_state_dict(last)
    return different, model(TOKENS).detach().float(), plain(TOKENS).detach()


@pytest.mark.parametrize("stage", CASES)
def test_what_rank_0_has_at_the_end_is_written_back(ranks_pool: RanksPool, stage: int) -> None:
    for different, output, right in ranks_pool.run(2, written, stage):
        assert different == []
        torch.testing.assert_close(output, right, rtol=0.1, atol=0.3)  # bfloat16


def failing(rank: int, world_size: int) -> dict[str, Any]:
    model = model_of(3)
    before = tz.full_state_dict(model)

    def fail(error: Exception | None, **options: Any) -> str:
        def run() -> None:
            with tz.full_parameters(model, **options) as module, torch.no_grad():
                module.row += 1
                if error is not None:
                    raise error

        return raised(run)

    def reshape() -> None:
        with tz.full_parameters(model, writeback=True) as module:
            module.row = nn.Parameter(torch.ones(3))

    results: dict[str, Any] = {
        "one rank": fail(ZeroDivisionError("boom") if rank == 1 else None, writeback=True),
        "without": fail(ZeroDivisionError("boom") if rank == 1 else None),
        "differs": fail(None, writeback=rank == 0),
        "reshaped": raised(reshape),
        "no model": raised(tz.full_parameters(fresh(Small)).__enter__),
    }
    results["changed"] = same(tz.full_state_dict(model), before)
    results["trains"] = model(TOKENS).isfinite().all().item()
    return results


@pytest.mark.slow
def test_an_error_leaves_nothing_behind(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, failing)
    assert first["one rank"] == ("RuntimeError: rank 1 refused the block of full_parameters, so every rank stops: boom")
    assert second["one rank"] == "ZeroDivisionError: boom"
    assert (first["without"], second["without"]) == ("nothing", "ZeroDivisionError: boom")
    for result in (first, second):
        assert "writeback differs between ranks" in result["differs"]
        assert "'row' is (3,) torch.float32 at the end of full_parameters" in result["reshaped"]
        assert "expected a module jitted with ZeroTransform, got Small" in result["no model"]
        assert result["changed"] == []
        assert result["trains"]

"""Inside of ``tz.full_parameters`` the plain module computes with full weights, which are freed at the end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.checkpoints import adamw, differing, take_step
from tests.harness.errors import error_of
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from thunder_zero.sharded.placeholders import Placeholder

TOKENS = torch.arange(9)
HALF = tz.MixedPrecision(torch.bfloat16, overrides={"layers.1": tz.MixedPrecision()})


def compute_in_full(model: Any) -> None:
    plain, weights = fresh(Small), tz.full_state_dict(model)
    plain.load_state_dict(weights)
    with tz.full_parameters(model) as module, torch.no_grad():
        output = module(TOKENS)
        assert output.dtype is torch.float32
        assert torch.equal(output, plain(TOKENS))
        assert module.head.weight is module.embed.weight
        assert not module.frozen.requires_grad
        reference = weakref.ref(module.embed.weight)
        for call in (lambda: model(TOKENS), tz.full_parameters(model).__enter__):
            assert "(Small) is inside full_parameters; leave that block" in error_of(call)
        module.row.data += 1  # is not written back
    gc.collect()
    assert reference() is None
    assert set(map(id, module.parameters())) == {id(param.shard) for param in model.state.params.values()}
    assert differing(tz.full_state_dict(model), weights) == []


def fail_in_block(model: Any, rank: int) -> None:
    """Check that an error in the block changes no parameter on any rank."""
    before = tz.full_state_dict(model)

    def run_block(error: Exception | None = None, row: tuple[int, ...] = (1, 5), **options: Any) -> str:
        def run() -> None:
            with tz.full_parameters(model, **options) as module:
                module.row = nn.Parameter(torch.ones(row))
                if error is not None:
                    raise error

        return error_of(run)

    fault = ZeroDivisionError("boom") if rank == 1 else None
    boom = "ZeroDivisionError: boom"
    rows = [
        (run_block(fault, writeback=True), boom if rank == 1 else "rank 1 refused the block of full_parameters"),
        (run_block(fault), boom if rank == 1 else "nothing"),
        (run_block(writeback=rank == 0), "writeback differs between ranks"),
        (run_block(row=(3,), writeback=True), "'row' is (3,) torch.float32 at the end of full_parameters"),
        (error_of(tz.full_parameters(fresh(Small)).__enter__), "a sharded model, got Small"),
    ]
    for sentence, words in rows:
        assert words in sentence, sentence
    assert differing(tz.full_state_dict(model), before) == []


def write_back(model: Any, rank: int) -> None:
    """Draw other values on each rank; check that rank 0's are written back."""
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
        plain.scale += 1
    with tz.full_parameters(model, writeback=True, rank0_only=True) as module, torch.no_grad():
        assert isinstance(module.scale, Placeholder) is (rank != 0)
        if rank == 0:
            module.scale += 1
    assert differing(tz.full_state_dict(model), plain.state_dict()) == []
    assert_close(model(TOKENS).float(), plain(TOKENS), rtol=0.1, atol=0.3)  # bfloat16; ZeRO-1 refreshes its copies


def use_full_parameters(rank: int, world_size: int, stage: int) -> None:
    model = sharded(fresh(Small), tz.Policy(stage, mixed_precision=HALF))
    take_step(model, adamw(model))
    compute_in_full(model)
    fail_in_block(model, rank)
    write_back(model, rank)


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_the_plain_module_computes_with_full_parameters_and_rank_0s_are_written_back(
    ranks_pool: RanksPool, stage: int
) -> None:
    ranks_pool.run(2, use_full_parameters, stage)

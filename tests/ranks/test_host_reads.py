"""A training step reads few tensors' values on the host, where a GPU's host would wait for all work to end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller

import pytest
import torch

import thunder_zero as tz
from tests.harness.host_reads import host_reads
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow

EACH_STEP = {
    0: [],
    1: ["tolist"],  # which parameters an optimizer stepped on any rank
    2: ["tolist"],  # check_gradients
    3: [],
}


def reads_of(call: Callable[[], object]) -> list[str]:
    with host_reads() as seen:
        call()
    return seen


def count_reads_of_steps(rank: int, world_size: int, stage: int) -> None:
    """Check the reads of a third step, of functions around a step, and of micro-batches under ``no_sync``."""
    model = sharded(fresh(Mlp, 4, 2), tz.Policy(stage=stage, check_gradients=stage == 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # AdamW reads its step counts, which are on the CPU
    x, items = torch.ones(2, 4), torch.tensor([1.0], requires_grad=True)

    def micro_batch() -> None:
        model(x).square().mean().backward()

    def step() -> None:
        micro_batch()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    names = reads_of(step)
    assert names == EACH_STEP[stage], names
    assert reads_of(lambda: tz.global_mean(model, items.sum(), 3)) == ["tolist"]
    micro_batch()
    assert reads_of(lambda: tz.clip_grad_norm_(model, 1.0)) == ["tolist"]
    names = reads_of(lambda: tz.clip_grad_norm_(model, 1.0, error_if_nonfinite=True))
    assert names == ["tolist", "_local_scalar_dense"], names
    if stage == 3:
        with model.no_sync():
            micro_batch()  # compiles
            assert reads_of(micro_batch) == []
        assert reads_of(micro_batch) == []


def count_reads_with_a_scaler(rank: int, world_size: int) -> None:
    half = tz.Policy(stage=3, mixed_precision=tz.MixedPrecision(torch.float16))
    model = sharded(fresh(Mlp, 4, 2), half)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for _ in range(2):  # the first time compiles
        loss = scaler.scale(model(torch.ones(2, 4).half()).float().square().mean())
        names = [reads_of(loss.backward), reads_of(lambda: scaler.unscale_(optimizer))]
        scaler.update()
    assert names == [[], []], names


@pytest.mark.parametrize("stage", [1, *slow(2, 3), *deep(0)])
def test_reads_of_a_step(ranks_pool: RanksPool, stage: int) -> None:
    ranks_pool.run(2, count_reads_of_steps, stage)


@pytest.mark.slow
def test_reads_with_a_scaler(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, count_reads_with_a_scaler)


def test_the_count_sees_every_kind_of_read() -> None:
    t = torch.tensor([1.0, 2.0])
    for name in ("tolist", "cpu", "nonzero"):
        assert reads_of(partial(methodcaller(name), t)) == [name]
    for call in (t[0].item, lambda: bool(t[0]), lambda: int(t[0]), lambda: float(t[0])):
        assert reads_of(call) == ["_local_scalar_dense"], call
    assert reads_of(lambda: t[t > 1]) == ["nonzero"]
    assert reads_of(lambda: t.sum() + t[0]) == []

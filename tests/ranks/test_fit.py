"""``tz.fit`` on several ranks: rank 0 decides for all, and the measured peak is within the budget."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held
from tests.harness.errors import raised
from tests.harness.models import fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.traced import Chain, ResidualBlock
from thunder_zero.comm.decide import on_rank_0

WIDTH, ROWS, BLOCKS = 128, 128, 3


def net() -> nn.Module:
    return Chain(*(ResidualBlock(WIDTH, torch.nn.functional.gelu) for _ in range(BLOCKS)))


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


def all_have_rank_0s_policy_which_fits(rank: int, world_size: int) -> None:
    module, x = fresh(net), torch.randn(ROWS, WIDTH)
    refusal = raised(lambda: tz.fit(module, (x,), memory_bytes=1000, file=StringIO()))
    assert refusal.startswith("DoesNotFit: no policy fits into 0.98 KiB"), refusal
    budget = int(0.85 * tz.memory(tz.trace(module, x, world_size=world_size), loss=loss_of).peak)
    policy = tz.fit(module, (x,), memory_bytes=budget * (1 + rank), loss=loss_of, file=StringIO())
    found: list[tuple[tz.Policy, str]] = [(policy, refusal)] * world_size
    dist.all_gather_object(found, (policy, refusal))
    assert found == [(policy, refusal)] * world_size, found
    peak = peak_of(sharded(module, policy), x)
    assert peak <= budget, (peak, budget)


def peak_of(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        loss_of(model(x)).backward()

    step()
    model.zero_grad()
    return bytes_held([*model.parameters(), x]) + added_at_peak(step, torch.device("cpu"))


@pytest.mark.slow
def test_all_ranks_have_rank_0s_policy_which_fits(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, all_have_rank_0s_policy_which_fits)


class OfTwo(Exception):
    """Made from two arguments, of which it tells pickle one."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


def rank_0_goes_on_or_fails(rank: int, world_size: int) -> None:
    calls: list[int] = []

    def decide(go_on: Callable[[], None]) -> int:
        for number in range(3):
            go_on()
            calls.append(number)
        return 7

    def fail(go_on: Callable[[], None]) -> int:
        go_on()
        raise ValueError("no")

    def fail_with_two(go_on: Callable[[], None]) -> int:
        raise OfTwo("bad loss", 2)

    assert on_rank_0("the test", decide, every=0.0) == 7
    assert calls == ([] if rank else [0, 1, 2]), calls
    assert raised(lambda: on_rank_0("the test", fail, every=0.0)) == "ValueError: no"
    text = "RuntimeError: rank 0 raised OfTwo: bad loss; see its traceback" if rank else "OfTwo: bad loss"
    assert raised(lambda: on_rank_0("the test", fail_with_two)) == text


def test_the_others_hear_that_rank_0_goes_on_and_what_it_raises(ranks_pool: RanksPool) -> None:
    """An error that cannot be sent is sent as text."""
    ranks_pool.run(2, rank_0_goes_on_or_fails)

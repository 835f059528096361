"""``tz.fit`` on several ranks: rank 0 decides for all, and the measured peak is within the budget."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from examples.tensor_memory import added_at_peak, bytes_held
from tests.harness.errors import raised
from tests.harness.models import sharded
from tests.harness.ranks import RanksPool
from tests.harness.residual import ResidualBlock
from thunder_zero.comm.decide import on_rank_0

pytestmark = pytest.mark.slow

WIDTH, ROWS, BLOCKS = 128, 128, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(ResidualBlock(WIDTH, torch.nn.functional.gelu) for _ in range(BLOCKS)))


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


def fit(rank: int, world_size: int, shares: tuple[float, ...]) -> dict[str, Any]:
    x = torch.randn(ROWS, WIDTH)
    plain = tz.memory(tz.trace(net(), x, world_size=world_size), loss=loss_of).peak
    refusal = raised(lambda: tz.fit(net(), (x,), memory_bytes=1000, file=StringIO()))
    found = []
    for share in shares:
        budget = int(share * plain)
        policy = tz.fit(net(), (x,), memory_bytes=budget, loss=loss_of, file=StringIO())
        found.append((policy, budget, peak_of(policy, x)))
    return {"refusal": refusal, "found": found}


def wait_for_rank_0(rank: int, world_size: int) -> tuple[int, list[int], str]:
    """Rank 0 says three times that it goes on; the others only hear of it."""
    calls: list[int] = []

    def decide(go_on: Callable[[], None]) -> int:
        for number in range(3):
            go_on()
            calls.append(number)
        return 7

    def fail(go_on: Callable[[], None]) -> int:
        go_on()
        raise ValueError("no")

    return on_rank_0("the test", decide, every=0.0), calls, raised(lambda: on_rank_0("the test", fail, every=0.0))


class OfTwo(Exception):
    """Made from two arguments, of which it tells pickle one."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first)
        self.second = second


def fail_with_two(rank: int, world_size: int) -> str:
    def fail(go_on: Callable[[], None]) -> int:
        raise OfTwo("bad loss", 2)

    return raised(lambda: on_rank_0("the test", fail))


def peak_of(policy: tz.Policy, x: Tensor) -> int:
    model = sharded(net(), policy)

    def step() -> None:
        loss_of(model(x)).backward()

    step()
    model.zero_grad()
    return bytes_held([*model.parameters(), x]) + added_at_peak(step, torch.device("cpu"))


def test_all_ranks_have_rank_0s_policy_which_fits(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, fit, (0.85, 1.2))
    assert [policy for policy, *_ in first["found"]] == [policy for policy, *_ in second["found"]]
    assert first["refusal"] == second["refusal"]
    assert first["refusal"].startswith("DoesNotFit: no policy fits into 0.98 KiB")
    for _, budget, peak in (*first["found"], *second["found"]):
        assert peak <= budget


def test_an_error_that_cannot_be_sent_is_sent_as_text(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, fail_with_two)
    assert first == "OfTwo: bad loss"
    assert second == "RuntimeError: rank 0 raised OfTwo: bad loss; see its traceback"


def test_the_other_ranks_hear_that_rank_0_goes_on(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, wait_for_rank_0)
    assert first == (7, [0, 1, 2], "ValueError: no")
    assert second == (7, [], "ValueError: no")

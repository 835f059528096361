"""Small shards of a unit lie side by side in one memory, so that a gather sends them without packing them first."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import fresh, sharded, whole
from tests.harness.ranks import RanksPool, everyone
from tests.harness.tiers import of_tier
from thunder_zero.comm import pairwise
from thunder_zero.comm.pairwise import PACK_BELOW_BYTES, Exchange, adjoining
from thunder_zero.plan import Param, make_plan
from thunder_zero.runtime.shards import side_by_side

WIDTH = 12  # divides by 2 and by 3, so that no shard has padding
LARGE = 6144  # rows of a weight that travels by itself: more than PACK_BELOW_BYTES to a peer, of 3 ranks too


class Block(nn.Module):
    """Biases between weights, a dtype of its own, a large weight in the middle, and uses in another order."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.last = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.large = nn.Parameter(torch.randn(LARGE, width))
        self.lower = nn.Linear(width, width).bfloat16()
        self.first = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(self.norm(x)) + self.lower(x.bfloat16()).float() + (x @ self.large.t()).mean(-1, keepdim=True)
        return self.last(torch.tanh(y))


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@contextmanager
def count_packing() -> Iterator[tuple[list[int], list[int]]]:
    """How many tensors each gather's messages were made of meanwhile: of those in place, and of those copied."""
    in_place: list[int] = []
    copied: list[int] = []
    pack = pairwise._pack

    def counted(tensors: Sequence[Tensor]) -> Tensor:
        message = pack(tensors)
        (in_place if message.data_ptr() == tensors[0].data_ptr() else copied).append(len(tensors))
        return message

    gather = Exchange.all_gather

    def watched(*args: Any) -> Any:
        with mock.patch.object(pairwise, "_pack", counted):
            return gather(*args)

    with mock.patch.object(Exchange, "all_gather", watched):
        yield in_place, copied


def train(rank: int, world_size: int, stage: int, width: int) -> dict[str, Any]:
    """Three steps: what was packed, the gradients of the last one, and all parameters after it."""
    model = sharded(fresh(Blocks, width), stage)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
    x = torch.linspace(-1, 1, 4 * world_size * width).view(world_size, 4, width)[rank]
    with count_packing() as (in_place, copied):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    apart = io.BytesIO()
    torch.save({name: value.clone() for name, value in model.state_dict().items()}, apart)
    return {
        "in place": in_place,
        "copied": copied,
        "shards": {name: value.detach().clone() for name, value in model.named_parameters()},
        "saved": (saved.tell(), apart.tell()),
    }


def train_alone(world_size: int, width: int) -> dict[str, Tensor]:
    """What one process computes with all ranks' batches."""
    module = fresh(Blocks, width)
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, foreach=True)
    x = torch.linspace(-1, 1, 4 * world_size * width).view(world_size, 4, width)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(module(part).square().mean() for part in x) / world_size).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("world_size", of_tier([3], [2, 3]))
@pytest.mark.parametrize("stage", of_tier([3], [2, 3]))
@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1])
def test_training_is_right_and_small_shards_travel_from_where_they_lie(
    ranks_pool: RanksPool, world_size: int, stage: int, width: int
) -> None:
    ranks = ranks_pool.run(world_size, train, stage, width)
    right = train_alone(world_size, width)
    for param in make_plan(fresh(Blocks, width), tz.Policy(stage=stage), world_size, 0).params:
        found = whole([one["shards"][param.path] for one in ranks], param.shape, sharded=param.sharded)
        torch.testing.assert_close(
            found, right[param.path], rtol=2e-2 if param.dtype.itemsize == 2 else 1e-4, atol=1e-4
        )
    for rank, one in enumerate(ranks):
        saved, apart = one["saved"]
        assert saved <= apart, "a state dict must hold the shared memory once"
        if width == WIDTH:
            # Forward: 6 of float32 and 2 of bfloat16 in each block, and the large one; backward: a product's factors.
            assert one["copied"] == [], rank
            forward = [6, 1, 2] * 2
            assert sorted(one["in place"][: len(forward)]) == sorted(forward)
            assert (len(one["in place"]) > 3 * len(forward)) == (stage == 3)
        else:
            assert (one["copied"] != []) == (rank == world_size - 1), "only the last rank has padding"


def orders(rank: int, world_size: int) -> list[list[str]]:
    def param(path: str, rows: int, dtype: torch.dtype = torch.float32, unit: str = "") -> Param:
        return Param(path, (), (rows,), dtype, dtype, dtype, True, unit, sharded=True, resident=False, kept=False)

    limit = world_size * PACK_BELOW_BYTES // 4  # rows whose shards are just too large to be packed
    params = [
        param("b.weight", 4),
        param("a.weight", 4),
        param("large", limit),
        param("b.bias", limit - world_size),
        param("half", 4, torch.bfloat16),
        param("a.half", 8, torch.bfloat16),
        param("alone", 4, unit="u"),
    ]
    return [[one.path for one in together] for together in Exchange(everyone()).neighbours(params)]


def test_what_travels_packed_lies_together_by_attribute_first(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, orders) == [[["b.bias", "a.weight", "b.weight"], ["half", "a.half"]]] * 2


def test_shards_side_by_side_are_tensors_of_their_own() -> None:
    values = [torch.randn(2, 3), torch.randn(4), torch.randn(1, 1, 2)]
    first, second, third = (nn.Parameter(value) for value in side_by_side(values))
    assert all(torch.equal(param, value) for param, value in zip((first, second, third), values, strict=True))
    assert not any(param._is_view() for param in (first, second, third))
    before = [param._version for param in (first, second, third)]
    kept = second.square()  # saves the second for backward
    with torch.no_grad():
        first.add_(1)
        torch._foreach_mul_([first, third], 2.0)
    assert [param._version - at for param, at in zip((first, second, third), before, strict=True)] == [2, 0, 1]
    kept.sum().backward()
    assert torch.equal(second.detach(), values[1])
    assert torch.equal(third.detach(), 2 * values[2])


def test_adjoining_tensors_are_one() -> None:
    shards = [shard.view(-1) for shard in side_by_side([torch.arange(4.0).view(2, 2), torch.arange(3.0)])]
    together = adjoining(shards)
    assert together is not None
    assert together.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert together.data_ptr() == shards[0].data_ptr()
    assert adjoining(shards[::-1]) is None
    assert adjoining([shards[0][:3], shards[1]]) is None, "there is padding between"
    memory = torch.zeros(8, dtype=torch.uint8)
    parts = [torch.frombuffer(memory.numpy(), dtype=torch.uint8, offset=at, count=4) for at in (0, 4)]
    assert adjoining(parts) is None, "memory of two owners, which happens to adjoin"

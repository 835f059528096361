"""In ZeRO-1, all ranks refresh the same stale parameters, however these were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import assert_near, digest, gather_objects
from tests.harness.errors import fails
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.sharded.dtensors import local


def change_weights(rank: int, world_size: int) -> None:
    """After each change of weights, all ranks compute like a plain model with the full weights, with equal bits."""
    x = torch.randn(2, 5)
    plain = fresh(Mlp, 5, 2)
    model = sharded(plain, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)

    def compare(how: str) -> None:
        plain.load_state_dict(tz.full_state_dict(model))
        y = model(x).detach()
        assert_near(y, plain(x).detach(), how)
        assert len(set(gather_objects(digest([y])))) == 1, f"{how}: ranks have other bits"

    with torch.no_grad():
        model(x)
        for param in model.parameters():
            param.add_(0.1)
    compare("updated in place")
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
    compare("loaded shards")
    model.load_original_state_dict(fresh(Mlp, 5, 2).state_dict())
    compare("loaded a plain state dict")
    model(x).sum().backward()
    if rank == 0:  # as a scaler that found Inf on other ranks would
        optimizer.step()
    compare("one rank stepped")
    model.zero_grad()
    for how, write in THROUGH_DATA.items():
        model(x).sum().backward()
        for param in model.parameters():
            write(param)
        model.zero_grad()
        compare(how)
    weight = model.get_parameter("layers.0.weight")
    weight.data.mul_(2)
    for _ in range(2):  # the error repeats
        fails(
            lambda: model(x),
            "'layers.0.weight' was written to in a way that PyTorch does not see (.data, numpy, a kernel)",
        )
    with torch.no_grad():
        weight.mul_(2)
    compare("seen again")


THROUGH_DATA: dict[str, Callable[[Any], Any]] = {  # writes that raise no version, as in hand-written optimizers
    "added to data": lambda param: param.data.add_(param.grad, alpha=-0.1),
    "foreach on data": lambda param: torch._foreach_add_([param.data], [param.grad], alpha=-0.1),
    "copied to data": lambda param: param.data.copy_(param.data - 0.1 * param.grad),
    "numpy": lambda param: np.negative(rows := local(param).detach().numpy(), out=rows),
    "clamped data": lambda param: param.data.clamp_(-0.1, 0.1),
    "turned rows": lambda param: local(param).data.copy_(local(param).data.flip(0)),
}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor) -> Tensor:
        embed, first, second = self.blocks
        y: Tensor = second(first(embed(tokens)))
        return y


def fail_with_gathers_in_flight(rank: int, world_size: int) -> None:
    """A failed forward refreshes no parameter whose bytes it has not decoded, although no version tells of the write.

    An index that the embedding lacks raises after the gather of the next block was launched.
    """
    model = sharded(Embedded(), 1, gather_format=tz.Int8())
    tokens = torch.arange(4)
    model(tokens).sum().backward()
    for param in model.parameters():
        param.data.mul_(2)
    fails(lambda: model(tokens + 8), "IndexError", "index out of range")
    y = model(tokens).detach()
    plain = Embedded()
    plain.load_state_dict(tz.full_state_dict(model))
    torch.testing.assert_close(y, plain(tokens).detach(), rtol=0.1, atol=0.3)


def test_a_failed_forward_refreshes_nothing(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, fail_with_gathers_in_flight)


def test_no_rank_computes_with_stale_rows(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, change_weights)

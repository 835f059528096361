"""Padding stays zero in parameters, gradients and states, whatever is done to gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.models import fresh, sharded
from tests.harness.ranks import RanksPool


class Noisy(torch.optim.SGD):
    """Adds noise to whole parameters, as Langevin dynamics does, and keeps a state that starts at one, and a mask, in
    which padding stays."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param].setdefault("ones", torch.ones_like(param))
            assert self.state[param].setdefault("mask", torch.ones_like(param, dtype=torch.bool)).all()
            param.add_(1.0)


def clip_nan(model: Any) -> None:
    with torch.no_grad():
        model.state.shards["weight"].grad[:2] = torch.nan  # no real row on rank 2
    tz.clip_grad_norm_(model, 1.0)


def fill(model: Any) -> None:
    for shard in model.state.shards.values():
        shard.grad.fill_(2.0)


WAYS: dict[str, Any] = {
    "a norm that is NaN": (clip_nan, lambda params: torch.optim.AdamW(params, 0.1)),
    "filled gradients": (fill, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)),
    "fused": (fill, lambda params: torch.optim.Adam(params, 0.1, fused=True)),
    "noise": (lambda model: None, lambda params: Noisy(params, 0.1, momentum=0.9)),
}


def padding(rank: int, world_size: int) -> dict[tuple[int, str], tuple[Tensor, float]]:
    """By stage and way: the padding of the parameter and its states after two steps, with the norm before the second;
    then the padding of the gradient."""
    found = {}
    for stage in (1, 3):
        model = sharded(fresh(lambda: nn.Linear(3, 4, bias=False)), tz.Policy(stage=stage, trust_optimizer=True))
        shard = model.state.shards["weight"]
        real = max(0, min(2, 4 - 2 * rank))
        for way, (change, make) in WAYS.items():
            model.load_original_state_dict({"weight": torch.ones(4, 3)})
            optimizer = make(model.parameters())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                change(model)
                norm = float(tz.clip_grad_norm_(model, 1e9))
                optimizer.step()
            values = [value for value in optimizer.state[shard].values() if isinstance(value, Tensor) and value.ndim]
            states = [value for value in values if value.is_floating_point()]
            assert shard.grad is not None
            tensors = (shard.detach(), shard.grad, *states)
            found[stage, way] = torch.cat([tensor[real:].flatten() for tensor in tensors]).clone(), norm
    return found


def test_padding_stays_zero(ranks_pool: RanksPool) -> None:
    """Four rows on three ranks: the last one has nothing but padding."""
    ranks = ranks_pool.run(3, padding)
    for rank, found in enumerate(ranks):
        for case, (rows, norm) in found.items():
            assert bool(len(rows)) is (rank == 2)
            assert not rows.any(), (rank, case, rows)
            if case[1] in ("filled gradients", "fused"):  # twelve real elements of 2
                assert abs(norm - 48**0.5) < 1e-5, (rank, case)

"""Every gradient scaler skips a step on all ranks if one rank finds NaN or Inf, in every dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import thunder_zero as tz
from tests.harness.models import fresh, sharded
from tests.harness.ranks import RanksPool

SCALERS: dict[str, Any] = {"torch's": torch.amp.GradScaler, "FSDP's": ShardedGradScaler}
OPTIMIZERS: dict[str, Any] = {
    "plain": lambda params: torch.optim.SGD(params, 0.1),
    "fused": lambda params: torch.optim.AdamW(params, 0.1, fused=True),
}


class Rows(nn.Module):
    """Five rows: with two ranks the last one stores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5, bias=False)
        self.own = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.own.float()


def poison(model: Any, where: str, rank: int, world_size: int) -> None:
    """Put Inf, after backward and on the last rank only, into a row or an ignored gradient."""
    if rank == world_size - 1:
        grads = dict(model.named_parameters())
        name, row = {"row": ("layer.weight", 0), "ignored": ("own", 0)}[where]
        grads[name].grad[row] = torch.inf


def skipped(rank: int, world_size: int) -> dict[tuple[str, str, str], Any]:
    """By scaler, optimizer and place: the scale after each of three steps, the second with Inf, and the rows then."""
    found = {}
    model = sharded(fresh(Rows), tz.Policy(stage=2, ignored=("own",)))
    for scaler_name, scaler_kind in SCALERS.items():
        for kind, make in OPTIMIZERS.items():
            for where in ("row", "ignored"):
                optimizer = make(model.parameters())
                scaler = scaler_kind("cpu", init_scale=16.0, growth_interval=100)
                scales, rows = [], []
                for step in range(3):
                    optimizer.zero_grad()
                    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
                    if step == 1:
                        poison(model, where, rank, world_size)
                        if kind == "plain":
                            scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
                    rows.append(model.state.shards["layer.weight"].detach().clone())
                found[scaler_name, kind, where] = scales, rows
    return found


def test_inf_after_backward_in_one_ranks_row_skips_the_step_on_all(ranks_pool: RanksPool) -> None:
    for rank, found in enumerate(ranks_pool.run(2, skipped)):
        for (scaler, kind, where), (scales, (first, second, third)) in found.items():
            case = (rank, scaler, kind, where)
            assert scales == [16.0, 8.0, 8.0], case
            assert torch.equal(first, second), case
            assert not torch.equal(second, third), case
            assert all(rows.isfinite().all() for rows in (first, second, third)), case

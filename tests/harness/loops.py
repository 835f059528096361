"""Training loops for ``as_one_process``: short loops, inference, failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.as_one_process import Side, Steps
from tests.harness.models import Mlp, bytes_of, storages
from thunder_zero.comm.pairwise import PairwiseGloo

WIDTH, ROWS = 5, 12  # of a global batch; 1, 2 and 3 divide its rows
FEW = 16  # bytes: some scalars


def batch(number: int = 0, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    """Return the rows of all ranks, equal in every process: (rows, width)."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr, momentum=0.9)


def step_on(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def two_steps(side: Side) -> Steps:
    (model,) = side.models
    optimizer = sgd(model)
    for number in range(2):
        y = model(side.rows(batch(number)))
        step_on(optimizer, y.square().mean())
        yield side.gather(y)


def deferred_steps(side: Side, width: int = WIDTH, lr: float = 0.1, steps: int = 2) -> Steps:
    """Train on three micro-batches a step, and defer the first two; the second step begins with zeros, not None."""
    (model,) = side.models
    optimizer = sgd(model, lr)
    for step in range(steps):
        for part in range(3):
            with model.no_sync() if side.is_sharded and part < 2 else nullcontext():
                y = model(side.rows(batch(3 * step + part, width=width)))
                y.square().mean().backward()
        optimizer.step()
        yield side.gather(y)
        optimizer.zero_grad(set_to_none=False)


# Ignored parameters

SMALL = 4 * 7 * 3  # bytes: the experts' biases and the adapters are smaller, the experts' weights are not


class Lora(nn.Module):
    """A frozen base, trained adapters of rank 2, two experts, and a router that differs by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 7, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 5))
        self.up = nn.Parameter(torch.randn(7, 2))
        self.router = nn.Linear(7, 7)
        self.experts = nn.ModuleList([nn.Linear(7, 3), nn.Linear(7, 3)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        x = torch.tanh(self.base(x) + x @ self.down.t() @ self.up.t())
        out: Tensor = self.experts[expert](torch.tanh(self.router(x)))
        return out


def experts(side: Side) -> Steps:
    """Train all but the base and the router, whose gradient differs by rank."""
    (model,) = side.models
    trained = [param for name, param in model.named_parameters() if name != "base.weight" and "router" not in name]
    optimizer = torch.optim.SGD(trained, 0.1, momentum=0.9)
    for step, expert in enumerate((1, 0, 0)):
        model.zero_grad()
        x = torch.randn(18, 5, generator=torch.Generator().manual_seed(step))
        y = model(side.rows(x), expert)
        y.square().mean().backward()
        optimizer.step()
        yield side.gather(y)


# Inference


class Statistics(nn.Module):
    """Dropout and BatchNorm, so that ``eval()`` changes the program. Dropout of probability 0 keeps the numbers."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.mlp, self.norm, self.drop = Mlp(WIDTH, 2), nn.BatchNorm1d(WIDTH, momentum=momentum), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.drop(self.norm(x)))


def interrupted(side: Side) -> Steps:
    """Run inference before each step. All ranks have all rows, so that statistics are equal."""
    (model,) = side.models
    optimizer = sgd(model)
    for step in range(3):
        model.eval()
        with torch.inference_mode():
            inferred = model(batch(10 + step)).clone()
        model.train()
        with torch.no_grad():
            computed = model(batch(20 + step))
        y = model(batch(step))
        step_on(optimizer, y.square().mean())
        yield torch.stack((inferred, computed, y.detach()))


# Failures


class Failure(Exception):
    """An error that tests raise in the middle of a step, on every rank."""


def fail(*args: Any, **kwargs: Any) -> Any:
    raise Failure


def failing(name: str, count: int) -> Any:
    """Let call number ``count`` of a transport's method raise inside the block."""
    method, calls = getattr(PairwiseGloo, name), itertools.count(1)
    return mock.patch.object(
        PairwiseGloo, name, lambda *args, **kwargs: fail() if next(calls) == count else method(*args, **kwargs)
    )


def in_loss(model: Any, x: Tensor) -> None:
    model(x)
    raise Failure


def in_hook(model: Any, x: Tensor) -> None:
    """Fail between the backward of the second call and the backward of the first call."""
    y = model(x)
    y.register_hook(fail)
    model(torch.tanh(y)).square().mean().backward()


def in_transport(model: Any, x: Tensor, gather: int, reduction: int) -> None:
    with failing("all_gather", gather), failing("all_reduce", reduction), failing("reduce_scatter", reduction):
        model(x).square().mean().backward()
    raise Failure  # stage 0 gathers nothing


def after_failures(side: Side, reduction: int = 3) -> Steps:
    """Train a step after each failure, and check that no memory stays behind.

    The second gather fails, and then reduction number ``reduction``. Two buckets are in flight at the third reduction.
    """
    model, held = side.models[0], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    in_gather, in_reduction = (
        partial(in_transport, gather=2 * (not count), reduction=count) for count in (0, reduction)
    )
    for step, failure in enumerate((in_loss, in_hook, in_gather, in_reduction)):
        if side.is_sharded:
            with pytest.raises(Failure):
                failure(model, side.rows(batch(50 + step)))
        loss = step_on(optimizer, model(side.rows(batch(step))).square().mean())
        held.append(bytes_of(storages().values()))
        yield side.mean(loss)
    later = held[1:]  # the first step allocates gradients
    assert not side.is_sharded or max(later) - min(later) <= FEW, held


def skips_what_overflows(model: Any, loss_of: Callable[[bool], Tensor]) -> None:
    """Check that all ranks skip the second of three steps, which overflows, halve torch's scale, and train on."""
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=16.0)
    scales, weights = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(step == 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(tz.full_state_dict(model))
    assert scales == [16.0, 8.0, 8.0], scales
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), (name, "skipped")
        assert not torch.equal(value, weights[2][name]), (name, "goes on")
        assert weights[2][name].isfinite().all()

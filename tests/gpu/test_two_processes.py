"""Two processes on one GPU train as one. Gloo carries the messages through host memory, at their waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.late import late_wire
from tests.harness.models import Small, fresh, relative_error
from tests.harness.ranks import RanksPool

import thunder

STEPS, ROWS = 3, 4
REHEARSAL = pytest.param("cpu", marks=(pytest.mark.slow, pytest.mark.rehearsal))


@pytest.fixture(scope="module", params=["cuda", REHEARSAL])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def processes(ranks_pool: RanksPool, device: str) -> Iterator[RanksPool]:
    if device == "cpu":
        yield ranks_pool
    else:
        with RanksPool(fresh=True) as pool:  # CUDA does not work in a process that was forked
            yield pool


def train(model: nn.Module, tokens: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return torch.stack(losses)


def all_tokens() -> Tensor:
    return torch.arange(3 * ROWS).view(ROWS, 3) % 9


def train_on_one_device(
    rank: int, world_size: int, device: str, stage: int, offload: bool, dynamo: bool, form: tz.Int8 | None = None
) -> Tensor:
    rows = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    with late_wire():
        options: dict[str, Any] = {
            "policy": tz.Policy(stage=stage, cpu_offload=offload, gather_format=form, reduce_format=form),
            "device": torch.device(device),
        }
        if dynamo:
            model: Any = tz.compile(fresh(Small), **options)
        else:
            model = thunder.jit(fresh(Small), transforms=[tz.ZeroTransform(**options)])
        return train(model, all_tokens()[rows].to(device))


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (2, False), (3, True)])
@pytest.mark.parametrize("dynamo", [False, True], ids=["thunder.jit", "tz.compile"])
@pytest.mark.filterwarnings("ignore:cpu_offload changes nothing")
def test_two_processes_train_as_one(processes: RanksPool, device: str, stage: int, offload: bool, dynamo: bool) -> None:
    result = torch.stack(processes.run(2, train_on_one_device, device, stage, offload, dynamo)).mean(0)
    assert relative_error(result, train(fresh(Small), all_tokens())) < 1e-4


@pytest.mark.parametrize("stage", [2, 3])
def test_two_processes_send_bytes_of_a_format(processes: RanksPool, device: str, stage: int) -> None:
    result = torch.stack(processes.run(2, train_on_one_device, device, stage, False, True, tz.Int8(4))).mean(0)
    error = relative_error(result, train(fresh(Small), all_tokens()))
    assert 1e-6 < error < 5e-2, "encoded values are rounded a little"

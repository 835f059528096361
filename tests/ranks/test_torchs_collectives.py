"""Under ``tz.compile``, a forward may use torch's collectives and DTensors: they are lines of the trace.

Each rank also trains its batch in eager mode; the sharded model's gradients must be the mean over ranks of eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves

import thunder_zero as tz
from tests.harness.as_one_process import assert_near
from tests.harness.models import fresh
from tests.harness.ranks import RanksPool, everyone
from thunder_zero.capture.zero_module import captured_forward
from thunder_zero.sharded.sharded_model import ShardedModel

Function = Callable[[Tensor, DeviceMesh], Any]
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


class Between(nn.Module):
    """A module that calls a function between two layers, of which the second takes tensors only."""

    def __init__(self, then: Function) -> None:
        super().__init__()
        self.first, self.second, self.then, self.mesh = nn.Linear(4, 4), nn.Linear(4, 4), then, make_mesh()

    def forward(self, x: Tensor | DTensor) -> Any:
        y = self.then(self.first(x.to_local() if isinstance(x, DTensor) else x), self.mesh)
        return (self.second(y.to_local()), y, x * 2) if isinstance(y, DTensor) else self.second(y)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def reduce_in_place(y: Tensor, mesh: DeviceMesh) -> Tensor:
    z = y.detach().clone()
    dist.all_reduce(z)
    return y * z


def call_functions(y: Tensor, mesh: DeviceMesh) -> Tensor:
    gathered = functional.all_gather_single_autograd(y, 0, everyone())
    return functional.reduce_scatter_single_autograd(gathered.cos(), "sum", 0, everyone())


def sum_over_ranks(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return functional.all_reduce(y, "sum", everyone()).sin()


def gather_and_sum(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return torch.stack(differentiable.all_gather(y)).sum(0)


def redistribute(y: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(y, mesh, [Shard(0)]).redistribute(placements=[Replicate()]) * 2
    columns = DTensor.from_local(y.exp(), mesh, [Partial()]).redistribute(placements=[Shard(1)])
    return whole.to_local().sin() + columns.full_tensor().mean()  # type: ignore[attr-defined]


def return_dtensor(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(y, mesh, [Shard(0)]).sin()


FUNCTIONS: dict[str, Function] = {
    "in place": reduce_in_place,
    "functions": call_functions,
    "summed": sum_over_ranks,
    "gathered": gather_and_sum,
    "DTensors": redistribute,
    "returned": return_dtensor,
}
NOT_EVALUATED = ("functions", "summed", "gathered", "DTensors")  # torch.compile traces their waits only with gradients


def batch(rank: int, mesh: DeviceMesh | None) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    return (x if mesh is None else DTensor.from_local(x, mesh, [Shard(0)])).requires_grad_()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_of(outputs: Any) -> Tensor:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([local(part).sin().sum() for part in parts]).sum()


def step_twice(model: Any, x: Tensor, *, evaluate: bool) -> Any:
    """Run a deferred backward, then reduced ones of the first output and of all. ``evaluate``: run inference before."""
    if evaluate:
        with torch.no_grad():
            model(x)
    outputs = model(x)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    if isinstance(model, ShardedModel):
        with model.no_sync():
            loss_of(model(x)).backward()
    else:
        loss_of(model(x)).backward()
    loss_of(first).backward(retain_graph=True)
    loss_of(outputs).backward()
    return outputs


def compare_with_eager(rank: int, world_size: int) -> None:
    for (name, then), kind in [(row, kind) for row in FUNCTIONS.items() for kind in ("tensor", "DTensor")]:
        if kind == "DTensor" and name != "returned":
            continue
        torch._dynamo.reset()
        module = fresh(partial(Between, then))
        model: Any = tz.compile(deepcopy(module), stage=3)
        mesh = module.mesh if kind == "DTensor" else None
        results = []
        for trained in (model, module):
            x = batch(rank, mesh)
            results.append([*tree_leaves(step_twice(trained, x, evaluate=name not in NOT_EVALUATED)), x.grad])
        for actual, expected in zip(*results, strict=True):
            assert type(actual) is type(expected)
            assert_near(local(actual).detach(), local(expected).detach(), name, 2e-5)
        for (path, actual), expected in zip(model.named_parameters(), module.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            assert_near(actual.grad.full_tensor(), expected.grad / world_size, f"{name}: {path}", 2e-5)


@pytest.mark.slow
def test_collectives_and_dtensors_train_as_in_eager_mode(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, compare_with_eager)


@torch.compiler.disable
def gather_rows(rows: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(rows))


class Contrastive(nn.Module):
    """A contrastive loss over the rows of all ranks. The gradient of the gathered rows is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = gather_rows(self.layer(x))
        return torch.bmm(rows.t()[None], torch.arange(len(rows) * 2.0).view(1, -1, 2)).sin().sum()


def train_contrastive(rank: int, world_size: int, expected: dict[str, Tensor]) -> None:
    model = tz.compile(fresh(Contrastive), stage=3)
    model(torch.arange(12.0).view(4, 3).cos().chunk(world_size)[rank]).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-4)
    (forward, *_), (loss, *_) = captured_forward(model).ran
    copies = ["_contiguous" in str(entry.traces().backward) for entry in (forward, loss)]
    assert copies == [False, True], "a copy where it is needed, no other"


def test_gradients_between_graphs_are_contiguous_where_gloo_reads_them(ranks_pool: RanksPool) -> None:
    """On gloo, torch's backward of ``all_gather`` sends a transposed gradient in its memory order: eager is wrong."""
    ranks_pool.run(2, train_contrastive, expected_gradients())


def expected_gradients() -> dict[str, Tensor]:
    """Return the gradients of one process: every rank has the loss of all rows, summed over ranks, then averaged."""
    module = fresh(Contrastive)
    rows = module.layer(torch.arange(12.0).view(4, 3).cos())
    torch.bmm(rows.t()[None], torch.arange(8.0).view(1, 4, 2)).sin().sum().backward()
    return {name: param.grad.clone() for name, param in module.named_parameters()}

"""Collectives of torch, and DTensors, in the forward of a model under ``tz.compile``: they are lines as others are.

Each rank trains its batch in eager mode, too; the mean over ranks of the gradients must be those of the sharded model.
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
from thunder_zero.sharded.sharded_model import ShardedModel

Then = Callable[[Tensor, DeviceMesh], Any]
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


class Between(nn.Module):
    """What a function makes between two layers; the second takes tensors only."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.first, self.second, self.then, self.mesh = nn.Linear(4, 4), nn.Linear(4, 4), then, one_dimension()

    def forward(self, x: Tensor | DTensor) -> Any:
        y = self.then(self.first(x.to_local() if isinstance(x, DTensor) else x), self.mesh)
        return (self.second(y.to_local()), y, x * 2) if isinstance(y, DTensor) else self.second(y)


def one_dimension() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def in_place(y: Tensor, mesh: DeviceMesh) -> Tensor:
    z = y.detach().clone()
    dist.all_reduce(z)
    return y * z


def of_functions(y: Tensor, mesh: DeviceMesh) -> Tensor:
    gathered = functional.all_gather_single_autograd(y, 0, everyone())
    return functional.reduce_scatter_single_autograd(gathered.cos(), "sum", 0, everyone())


def summed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return functional.all_reduce(y, "sum", everyone()).sin()


def gathered(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return torch.stack(differentiable.all_gather(y)).sum(0)


def redistributed(y: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(y, mesh, [Shard(0)]).redistribute(placements=[Replicate()]) * 2
    columns = DTensor.from_local(y.exp(), mesh, [Partial()]).redistribute(placements=[Shard(1)])
    return whole.to_local().sin() + columns.full_tensor().mean()  # type: ignore[attr-defined]


def returned(y: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(y, mesh, [Shard(0)]).sin()


ROWS: dict[str, Then] = {
    "in place": in_place,
    "functions": of_functions,
    "summed": summed,
    "gathered": gathered,
    "DTensors": redistributed,
    "returned": returned,
}
TRAINED = (
    "functions",
    "summed",
    "gathered",
    "DTensors",
)  # torch.compile itself traces their waits with gradients alone


def batch(rank: int, mesh: DeviceMesh | None) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    return (x if mesh is None else DTensor.from_local(x, mesh, [Shard(0)])).requires_grad_()


def plain(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_of(outputs: Any) -> Tensor:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([plain(part).sin().sum() for part in parts]).sum()


def step(model: Any, x: Tensor, *, evaluate: bool) -> Any:
    """Defer, and reduce: one output alone, then all of them; evaluate before."""
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


def trains(rank: int, world_size: int) -> None:
    for (name, then), given in [(row, given) for row in ROWS.items() for given in ("tensor", "DTensor")]:
        if given == "DTensor" and name != "returned":
            continue
        torch._dynamo.reset()
        module = fresh(partial(Between, then))
        model: Any = tz.compile(deepcopy(module), stage=3)
        mesh = module.mesh if given == "DTensor" else None
        results = []
        for each in (model, module):
            x = batch(rank, mesh)
            results.append([*tree_leaves(step(each, x, evaluate=name not in TRAINED)), x.grad])
        for mine, right in zip(*results, strict=True):
            assert type(mine) is type(right)
            assert_near(plain(mine).detach(), plain(right).detach(), name, 2e-5)
        for (path, mine), right in zip(model.named_parameters(), module.parameters(), strict=True):
            dist.all_reduce(right.grad)
            assert_near(mine.grad.full_tensor(), right.grad / world_size, f"{name}: {path}", 2e-5)


def test_collectives_and_dtensors_train_as_in_eager_mode(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, trains)


@torch.compiler.disable
def rows_of_all(rows: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(rows))


class Similar(nn.Module):
    """A contrastive loss over the rows of all ranks, whose gradient of the gathered rows is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = rows_of_all(self.layer(x))
        return torch.bmm(rows.t()[None], torch.arange(len(rows) * 2.0).view(1, -1, 2)).sin().sum()


def contrasts(rank: int, world_size: int, right: dict[str, Tensor]) -> None:
    model = tz.compile(fresh(Similar), stage=3)
    model(torch.arange(12.0).view(4, 3).cos().chunk(world_size)[rank]).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), right[name], rtol=1e-4, atol=1e-4)
    (forward, *_), (loss, *_) = model.graphs()
    copies = ["_contiguous" in str(entry.traces().backward) for entry in (forward, loss)]
    assert copies == [False, True], "a copy where it is needed, no other"


def test_gradients_between_graphs_are_contiguous_where_gloo_reads_them(ranks_pool: RanksPool) -> None:
    """torch's backward of ``all_gather`` on gloo sends a transposed gradient as it lies in memory: eager is wrong."""
    ranks_pool.run(2, contrasts, right_gradients())


def right_gradients() -> dict[str, Tensor]:
    """Of one process: each rank's loss is that of all rows, and gradients are summed, then averaged."""
    module = fresh(Similar)
    rows = module.layer(torch.arange(12.0).view(4, 3).cos())
    torch.bmm(rows.t()[None], torch.arange(8.0).view(1, 4, 2)).sin().sum().backward()
    return {name: param.grad.clone() for name, param in module.named_parameters()}

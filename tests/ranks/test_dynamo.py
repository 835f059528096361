"""Models that dynamo captures: several graphs, what ends a graph, and modules that Thunder alone cannot trace."""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import count_sends
from tests.harness.ranks import RanksPool
from thunder_zero.rows import own_rows

pytestmark = pytest.mark.slow

STEPS = 3


class Layers(nn.Module):
    """Three layers of one class, each with a graph break in the middle."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves(breaks) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Halves(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.b(x.relu()).mean() if x.shape[-1] == 5 else self.b(x.relu())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()) @ self.a.weight.t()


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = parametrizations.weight_norm(nn.Linear(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


class Listed(nn.Module):
    """Parameters in a list and in a dict, and all of them in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(5, 5)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(5))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x @ weight
        for param in self.parameters():
            x = x + param.reshape(-1)[:5]
        return x * self.named["scale"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.first = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(1, x.shape[0], 6)
        return self.attention(x, x, x, need_weights=False)[0]


class Router(nn.Module):
    """Operations in place: on a value of the graph, and on one that graph after graph adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).topk(3).values
        weights /= weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            torch._dynamo.graph_break()
            total.add_(expert(x) * weights[:, at, None])
        return total


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.a.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.a.register_forward_hook(lambda module, args, output: output.relu())

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class Buffers(nn.Module):
    """Buffers that forward writes to, and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a = nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 5)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.norm(self.a(x))


MODULES: dict[str, tuple[Callable[[], nn.Module], int | None]] = {  # and how many graphs a forward runs
    "one graph": (lambda: Layers(breaks=False), 1),
    "graph breaks": (Layers, 6),
    "tied": (Tied, 1),
    "weight norm": (Parametrized, 1),
    "lists of parameters": (Listed, 1),
    "attention": (Attention, 1),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True), 1),
    "in place": (Router, None),
    "hooks": (Hooked, 1),
    "buffers": (Buffers, None),
}


def batches(world_size: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 5, generator=generator) for _ in range(world_size)] for _ in range(STEPS)]


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def train(rank: int, world_size: int, name: str, stage: int) -> dict[str, Any]:
    make, _ = MODULES[name]
    torch.manual_seed(0)
    plain = make()
    one = deepcopy(plain)
    model = tz.compile(plain, stage=stage)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02, momentum=0.9) for each in (model, one)]
    for batch in batches(world_size):
        with model.no_sync():
            loss(model, batch[rank]).backward()
        loss(model, batch[rank] + 1).backward()
        sum(loss(one, x + more) for x in batch for more in (0, 1)).div(world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = tz.full_state_dict(model)
    right = dict(one.named_parameters())
    if isinstance(plain, Buffers):
        assert model.seen.item() == plain.norm.num_batches_tracked.item() == 2 * STEPS
        assert not model.seen.requires_grad
    return {
        "graphs": len(model.graphs()),
        "error": max((full[key] - value).detach().abs().max().item() for key, value in right.items())
        if rank == 0
        else 0.0,
    }


@pytest.mark.parametrize(("name", "stage"), [*((name, 3) for name in MODULES), ("tied", 1), ("graph breaks", 1)])
def test_trains_as_one_process_does(ranks_pool: RanksPool, name: str, stage: int) -> None:
    for found in ranks_pool.run(2, train, name, stage):
        assert found["error"] <= 1e-5
        assert MODULES[name][1] in (None, found["graphs"])


# Reads outside of graphs, and the looks of parameters.


class Outside(nn.Module):
    """Reads a parameter where dynamo may not look."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.read = torch.compiler.disable(read)

    def forward(self, x: Tensor) -> Tensor:
        self.read(self.inner.weight)
        return self.inner(x)


READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda weight: weight.norm(),
    "looks": lambda weight: (weight.dtype, weight.shape, weight.device, weight.requires_grad, len(weight)),
}


def compiled_again(rank: int, world_size: int) -> float:
    """torch.compile around the model leaves to us what we capture."""
    torch.manual_seed(0)
    plain, x = nn.Linear(5, 5), torch.ones(2, 5)
    right = plain(x).detach()
    model = tz.compile(plain, stage=3)
    return float((torch.compile(model)(x) - right).abs().max())


def test_torch_compile_around_the_model(ranks_pool: RanksPool) -> None:
    assert max(ranks_pool.run(2, compiled_again)) <= 1e-6


def read_outside(rank: int, world_size: int, name: str) -> tuple[str, int]:
    model = tz.compile(Outside(READS[name]), stage=3)
    with count_sends() as sent:
        said = raised(lambda: model(torch.ones(2, 5)))
    return said, sum(sent)


def test_a_read_outside_of_every_graph_is_refused(ranks_pool: RanksPool) -> None:
    for said, nbytes in ranks_pool.run(2, read_outside, "norm"):
        for word in ("Linear", "'inner.weight'", "outside of the graphs", "dynamo ended a graph at"):
            assert word in said
        assert nbytes == 0
    for rows, (said, nbytes) in zip((3, 2), ranks_pool.run(2, read_outside, "looks"), strict=True):
        assert said == "nothing"
        assert nbytes == 4 * (rows * 5 + rows)  # the gather of the weight and the bias, by the graph


def test_a_part_that_thunder_gets_wrong_is_refused_as_without_dynamo(ranks_pool: RanksPool) -> None:
    for said in ranks_pool.run(2, recurrent):
        assert "(LSTM) is a recurrent layer" in said


def recurrent(rank: int, world_size: int) -> str:
    return raised(lambda: tz.compile(nn.Sequential(nn.LSTM(4, 3))))


# What happens once a step, and what ranks compare.


def not_none(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad


def deferred(rank: int, world_size: int) -> tuple[int, int, float]:
    """How often a backward asks what other ranks have deferred, and reduces it; by three graphs and an idle layer."""
    torch.manual_seed(0)
    plain = Branches()
    one = deepcopy(plain)
    model, x = tz.compile(plain, stage=2), torch.ones(2, 5) * (rank + 1)
    with model.no_sync():
        loss(model, x).backward()
    plain.idle = True
    asked = []
    on_any_rank = model.state.on_any_rank
    with mock.patch.object(model.state, "on_any_rank", lambda *a: asked.append(a) or on_any_rank(*a)):
        loss(model, x).backward()
        first = len(asked)
        loss(model, x).backward()
    for of in range(world_size):
        for one.idle in (False, True, True):
            (loss(one, torch.ones(2, 5) * (of + 1)) / world_size).backward()
    grads = {name: not_none(param.grad) for name, param in one.named_parameters()}
    own = {name: not_none(param.grad) for name, param in model.named_parameters()}
    plan = model.state.plan
    error = max(float((own[p.path] - own_rows(grads[p.path], p, plan)).abs().max()) for p in plan.params)
    return first, len(asked), error


class Branches(nn.Module):
    """Two graphs, and a layer that some forwards leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.idle = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        torch._dynamo.graph_break()
        x = self.b(x)
        return x if self.idle else self.other(x)


def test_deferred_gradients_are_reduced_once_a_backward(ranks_pool: RanksPool) -> None:
    for first, both, error in ranks_pool.run(2, deferred):
        assert (first, both) == (1, 1)  # nothing was deferred before the second
        assert error <= 1e-6


def alone(rank: int, world_size: int) -> list[float]:
    """Rank 1 compiles again and again; nobody waits for it."""
    torch.manual_seed(0)
    plain = Layers(breaks=True)
    one = deepcopy(plain)
    model = tz.compile(plain, stage=3)
    found = []
    for step in range(3):
        batches = [torch.ones(2, 5), torch.ones(2 + step, 5)]
        sum(loss(one, x) for x in batches).div(2).backward()
        loss(model, batches[rank]).backward()
        path = "layers.1.a.weight"
        param = model.state.plan.by_name[path]
        right = own_rows(not_none(one.get_parameter(path).grad), param, model.state.plan)
        found.append(float((model.get_parameter(path).grad - right).abs().max()))
    return found


def test_a_rank_may_compile_again_alone(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, alone):
        assert max(found) <= 1e-6


class ByValue(nn.Module):
    """Ends its first graph where the values of a batch say so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else self.b(x)


def by_value(rank: int, world_size: int) -> str:
    model = tz.compile(ByValue(), stage=3)
    return raised(lambda: model(torch.ones(2, 5) * (1 if rank else -1)))


def test_ranks_whose_graphs_differ_hear_of_it(ranks_pool: RanksPool) -> None:
    for said in ranks_pool.run(2, by_value):
        assert "RuntimeError" in said
        assert "graph" in said
        assert "rank 0" in said
        assert "rank 1" in said


# What dynamo keeps.


def freed(rank: int, world_size: int) -> list[bool]:
    """Whether a model and its shards are gone when nobody has the model any more."""
    model = tz.compile(Layers(), stage=3)
    for _ in range(2):
        model(torch.ones(4, 5)).sum().backward()
    left = [ref(thing) for thing in (model, *model.parameters())]
    del model
    gc.collect()
    return [thing() is None for thing in left]


def test_a_model_is_freed_with_its_last_reference(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(1, freed):
        assert all(found), found
        assert len(found) > 4

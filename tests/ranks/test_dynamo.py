"""Models that dynamo captures: several graphs, what ends a graph, and modules that Thunder alone cannot trace."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import thunder_zero as tz
from tests.harness.as_one_process import trains_as_one_process
from tests.harness.errors import error_of
from tests.harness.loops import deferred_steps
from tests.harness.models import Halves, Zoo, count_sends, fresh
from tests.harness.ranks import RanksPool

pytestmark = pytest.mark.slow

WIDTH = 9  # of Zoo's inputs


class Layers(nn.Module):
    """Three layers of one class, each with a graph break in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Halves(WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Listed(nn.Module):
    """Parameters in a list and in a dict, and all of them in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x @ weight
        for param in self.parameters():
            x = x + param.reshape(-1)[:WIDTH]
        return x * self.named["scale"]


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    layer.register_forward_hook(lambda module, args, output: output.relu())
    return layer


class Router(nn.Module):
    """Operations in place: on a value of the graph, and on one that graph after graph adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1).topk(3).values
        weights /= weights.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            torch._dynamo.graph_break()
            total.add_(expert(x) * weights[:, at, None])
        return total


def one_graph() -> nn.Module:
    weight_norm = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    attention = nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.0, batch_first=True, norm_first=True)
    pairs_of_rows = nn.Unflatten(0, (-1, 2))
    return nn.Sequential(weight_norm, Listed(), hooked(), pairs_of_rows, attention)


MODULES: dict[str, tuple[Callable[[], nn.Module], int, int | None]] = {  # with stages; graphs of a forward
    "one graph": (one_graph, 3, 1),
    "graph breaks": (Layers, 3, 6),
    "graph breaks, ZeRO-1": (Layers, 1, 6),
    "in place": (Router, 3, None),
    "parameters of every kind": (lambda: Zoo().eval(), 3, 1),
}


def train(rank: int, world_size: int, name: str) -> None:
    make, stage, graphs = MODULES[name]
    plain = fresh(make)
    model: Any = tz.compile(deepcopy(plain), stage=stage)
    steps = 1 if isinstance(plain, Zoo) else 2  # bfloat16 rounds, and its next step would differ
    trains_as_one_process([(model, plain)], partial(deferred_steps, width=WIDTH, lr=0.02, steps=steps))
    assert graphs in (None, len(model.graphs())), len(model.graphs())


@pytest.mark.parametrize("name", MODULES)
def test_trains_as_one_process_does(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(2, train, name)


# Reads outside of graphs, and the looks of parameters


class Outside(nn.Module):
    """Reads a parameter where dynamo may not look."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.read = torch.compiler.disable(read)

    def forward(self, x: Tensor) -> Tensor:
        self.read(self.inner.weight)
        return self.inner(x)


def reads_outside(rank: int, world_size: int) -> None:
    model, x = tz.compile(Outside(lambda weight: weight.norm()), stage=3), torch.ones(2, WIDTH)
    with count_sends() as sent:
        said = error_of(lambda: model(x))
    for word in ("Linear", "'inner.weight'", "outside of the graphs", "dynamo ended a graph at"):
        assert word in said, said
    assert not sent, sent
    looks = lambda weight: (weight.dtype, weight.shape, weight.device, weight.requires_grad, len(weight))  # noqa: E731
    model = tz.compile(Outside(looks), stage=3)
    with count_sends() as sent:
        model(x)
    own = 5 - rank
    assert sum(sent) == 4 * (own * WIDTH + own), "the graph's gather of weight and bias"


def test_a_read_outside_of_every_graph_is_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, reads_outside)


def compiled_again(rank: int, world_size: int) -> None:
    """torch.compile around the model leaves to us what we capture."""
    plain, x = fresh(nn.Linear, WIDTH, WIDTH), torch.ones(2, WIDTH)
    right = plain(x).detach()
    assert_close(torch.compile(tz.compile(plain, stage=3))(x).detach(), right)
    with suppress(ImportError):
        import lightning.fabric  # noqa: F401  # it puts a function of its own in front of torch.compile
    assert_close(torch.compile(tz.compile(fresh(nn.Linear, WIDTH, WIDTH), stage=3))(x).detach(), right)


def test_torch_compile_around_the_model(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, compiled_again)


# What dynamo keeps, and how often it compiles


def freed(rank: int, world_size: int) -> None:
    model = tz.compile(Layers(), stage=3)
    for _ in range(2):
        model(torch.ones(4, WIDTH)).sum().backward()
    left = [ref(thing) for thing in (model, *model.parameters())]
    del model
    gc.collect()
    assert len(left) > 4
    assert [thing() for thing in left] == [None] * len(left)


def test_a_model_is_freed_with_its_last_reference(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, freed)

"""Every class of ``torch.nn`` that has parameters trains under ``tz.compile`` as in eager mode, or is refused.

A class that a new torch brings, and that has no row here, fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function

import thunder_zero as tz
from tests.harness.eager import trains_as_eager
from tests.harness.errors import fails
from tests.harness.models import fresh
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]
WORDS = 3


class Words(tuple[int, ...]):
    """The shape of an input of integers below WORDS."""


class AsksForTypes(nn.Module):
    """A module that tests a parameter's type, and calls functions that test ``has_torch_function``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        is_plain = type(self.w) is nn.Parameter and self.w.grad is None and not has_torch_function((self.w,))
        first, second = self.w
        scale = F.pad(self.w, (1, 2)).mean() + F.threshold(self.w, 0.1, 0.5).mean() + self.w.norm()
        return F.rms_norm(x, (4,), first) * scale + self.w.unflatten(1, (2, 2)).sum() * second * (2 if is_plain else 3)


ROWS = (2, 3, 4)
BLOCK: dict[str, Any] = {"dim_feedforward": 5, "dropout": 0.0, "batch_first": True}
FAST: tuple[tuple[Make, *tuple[Shape, ...]], ...] = (  # how to make a layer, and the shapes of its inputs
    (AsksForTypes, ROWS),
    (partial(nn.BatchNorm1d, 3), (4, 3)),
    (partial(nn.Conv2d, 2, 3, 2), (2, 2, 5, 4)),
    (partial(nn.Embedding, WORDS, 4, padding_idx=1), Words((2, 5))),
    (partial(nn.LazyLinear, 7), (2, 5)),
    (partial(nn.Linear, 5, 7), (2, 5)),
)
SLOW: tuple[tuple[Make, *tuple[Shape, ...]], ...] = (
    (partial(nn.AdaptiveLogSoftmaxWithLoss, 4, 6, cutoffs=[2]), (7, 4), Words((7,))),
    (partial(nn.BatchNorm2d, 3), (4, 3, 2, 2)),
    (partial(nn.BatchNorm3d, 3), (4, 3, 2, 2, 2)),
    (partial(nn.Bilinear, 3, 4, 5), (2, 3), (2, 4)),
    (partial(nn.Conv1d, 2, 3, 2), (2, 2, 5)),
    (partial(nn.Conv3d, 2, 3, 2), (2, 2, 3, 3, 3)),
    (partial(nn.ConvTranspose1d, 2, 3, 2), (2, 2, 5)),
    (partial(nn.ConvTranspose2d, 2, 3, 2), (2, 2, 4, 3)),
    (partial(nn.ConvTranspose3d, 2, 3, 2), (2, 2, 3, 3, 3)),
    (partial(nn.EmbeddingBag, WORDS, 4), Words((2, 5))),
    (partial(nn.GroupNorm, 2, 4), (2, 4, 3)),
    (partial(nn.GRU, 4, 3), ROWS),
    (partial(nn.GRUCell, 4, 3), (2, 4)),
    (partial(nn.InstanceNorm1d, 3, affine=True, track_running_stats=True), ROWS),
    (partial(nn.InstanceNorm2d, 3, affine=True), (2, 3, 4, 2)),
    (partial(nn.InstanceNorm3d, 3, affine=True), (2, 3, 2, 2, 2)),
    (partial(nn.LayerNorm, (3, 4)), ROWS),
    (nn.LazyBatchNorm1d, (4, 3)),
    (nn.LazyBatchNorm2d, (4, 3, 2, 2)),
    (nn.LazyBatchNorm3d, (4, 3, 2, 2, 2)),
    (partial(nn.LazyConv1d, 3, 2), (2, 2, 5)),
    (partial(nn.LazyConv2d, 3, 2), (2, 2, 4, 3)),
    (partial(nn.LazyConv3d, 3, 2), (2, 2, 3, 3, 3)),
    (partial(nn.LazyConvTranspose1d, 3, 2), (2, 2, 5)),
    (partial(nn.LazyConvTranspose2d, 3, 2), (2, 2, 4, 3)),
    (partial(nn.LazyConvTranspose3d, 3, 2), (2, 2, 3, 3, 3)),
    (partial(nn.LazyInstanceNorm1d, affine=True, track_running_stats=False), ROWS),
    (partial(nn.LazyInstanceNorm2d, affine=True, track_running_stats=False), (2, 3, 4, 2)),
    (partial(nn.LazyInstanceNorm3d, affine=True, track_running_stats=False), (2, 3, 2, 2, 2)),
    (partial(nn.LinearCrossEntropyLoss, 5, WORDS), (4, 5), Words((4,))),
    (partial(nn.LSTM, 4, 3, bidirectional=True), ROWS),
    (partial(nn.LSTMCell, 4, 3), (2, 4)),
    (partial(nn.MultiheadAttention, 4, 2), ROWS, ROWS, ROWS),
    (partial(nn.PReLU, 3), ROWS),
    (partial(nn.RMSNorm, 4), ROWS),
    (partial(nn.RNN, 4, 3), ROWS),
    (partial(nn.RNNCell, 4, 3), (2, 4)),
    (partial(nn.Transformer, 4, 2, 1, 1, **BLOCK), ROWS, ROWS),
    (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, **BLOCK), 1), ROWS, ROWS),
    (partial(nn.TransformerDecoderLayer, 4, 2, **BLOCK), ROWS, ROWS),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **BLOCK), 1), ROWS),
    (partial(nn.TransformerEncoderLayer, 4, 2, **BLOCK), ROWS),
)
REFUSED: tuple[tuple[Make, Shape, str], ...] = (  # with torch's error
    (partial(nn.SyncBatchNorm, 3), (4, 3), "SyncBatchNorm expected input tensor to be on GPU"),
)
WITHOUT_PARAMETERS = {"FractionalMaxPool2d", "FractionalMaxPool3d", "Unflatten"}  # their arguments cannot all be 2


def names_of(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [type(make()).__name__ for make, *_ in rows]


LAYERS = dict(zip(names_of(FAST + SLOW), FAST + SLOW, strict=True))


def may_have_parameters(kind: type[nn.Module]) -> bool:
    """Return whether a class, except a container, has parameters, or cannot be built from twos alone."""
    if kind.forward is nn.Module.forward:
        return False
    args = [p for p in inspect.signature(kind).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        return any(True for _ in kind(*[2 for p in args if p.default is p.empty]).parameters())
    except (TypeError, ValueError):
        return True


@pytest.mark.filterwarnings("ignore")  # deprecated classes
def test_every_layer_of_torch_has_a_row() -> None:
    kinds = {name: kind for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    layers = {name for name, kind in kinds.items() if may_have_parameters(kind)}
    missing = layers - {*LAYERS, *names_of(REFUSED), *WITHOUT_PARAMETERS}
    assert not missing, f"torch.nn has {sorted(missing)}; give each a row in FAST, SLOW or REFUSED"


def inputs_of(shapes: Sequence[Shape], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, WORDS, shape, generator=generator)
        if isinstance(shape, Words)
        else torch.randn(shape, generator=generator).requires_grad_()
        for shape in shapes
    ]


def train(rank: int, world_size: int, name: str, stage: int) -> None:
    make, *shapes = LAYERS[name]
    trains_as_eager(rank, world_size, make, partial(inputs_of, shapes), stage)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *product(names_of(FAST), (3,)),
        *slow(*product(names_of(FAST), (0,)), *zip(names_of(SLOW), cycle((3, 0)), strict=False)),  # each layer once
        *deep(*zip(names_of(SLOW), cycle((0, 3)), strict=False)),
    ],
)
def test_a_layer_trains_as_in_eager_mode(ranks_pool: RanksPool, name: str, stage: int) -> None:
    ranks_pool.run(2, train, name, stage)


def refuse_layers(rank: int, world_size: int) -> None:
    for make, shape, words in REFUSED:
        model: Any = tz.compile(fresh(make), stage=3)
        fails(partial(model, *inputs_of([shape], 0)), "ValueError", words)


def test_other_layers_are_refused_with_a_sentence(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, refuse_layers)

"""Submodules that Thunder gets wrong or cannot trace are refused by path, with a way out, before one is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint

import thunder_zero as tz
from tests.harness.errors import refused
from thunder_zero.refusals import PARTS

import thunder


def compiled() -> Any:
    return torch.compile(nn.Linear(4, 4), backend="eager")


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_full_backward_hook(lambda module, given, of_output: None)
    return module


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(4, 4))


# What Thunder 0.2.6 does with each alone: silently wrong are backward hooks (not called) and the statistics of instance
# norms (not updated); others fail with errors that name no module.
MADE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "torch.compile": (compiled, ("(OptimizedModule) is under torch.compile", "without torch.compile")),
    "checkpoint": (lambda: checkpoint(nn.Linear(4, 4)), ("_composable.checkpoint", "torch.utils.checkpoint")),
    "backward hook": (hooked, ("(Linear) has backward hooks", "never calls them", "model.parameters()")),
    "attention": (lambda: nn.MultiheadAttention(4, 2), ("(MultiheadAttention)", "scaled_dot_product_attention")),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2), ("part.self_attn", "scaled_dot_product_attention")),
    "LSTM": (lambda: nn.LSTM(4, 4), ("(LSTM) is a recurrent layer", "loop of linear layers")),
    "InstanceNorm": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        ("track_running_stats=True", "does not update", "track_running_stats=False"),
    ),
    "BatchNorm": (lambda: nn.BatchNorm1d(4, momentum=None), ("has momentum=None", "give it a momentum")),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), ("(SyncBatchNorm)", "each rank's own")),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), ("has max_norm", "normalise the rows in forward")),
    "sparse": (lambda: nn.EmbeddingBag(4, 4, sparse=True, mode="sum"), ("has sparse=True", "use sparse=False")),
    "spectral_norm": (normed(nn.utils.spectral_norm), ("is under spectral_norm", "in forward")),
    "spectral_norm, parametrized": (
        normed(nn.utils.parametrizations.spectral_norm),
        ("is under spectral_norm", "in forward"),
    ),
    "weight_norm": (normed(nn.utils.weight_norm), ("is under weight_norm", "in forward")),
    "weight_norm, parametrized": (
        normed(nn.utils.parametrizations.weight_norm),
        ("is under weight_norm", "in forward"),
    ),
    "DataParallel": (lambda: nn.DataParallel(nn.Linear(4, 4)), ("is a DataParallel", "inside of it")),
    "DDP": (lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), ("is a DistributedDataParallel", "inside")),
    "script": (lambda: torch.jit.script(nn.Linear(4, 4)), ("ScriptModule", "before torch.jit.script")),
}


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_a_submodule_that_thunder_gets_wrong() -> None:
    missed = set(PARTS)
    for make, words in MADE.values():
        module = nn.Sequential()
        module.add_module("first", nn.Linear(4, 4))
        module.add_module("part", make())
        before = dict(module.named_parameters())
        with refused(RuntimeError, "submodule 'part", "of Sequential", *words):
            thunder.jit(module, transforms=[tz.ZeroTransform(stage=2)])
        assert all(param is before[name] for name, param in module.named_parameters()), "nothing was sharded"
        missed -= {part for part in PARTS if any(map(part.is_it, module.modules()))}
    assert not missed, "every row has a case"
    with refused(RuntimeError, "'1.weight' of Sequential is a lazy module's", "with a batch before thunder.jit"):
        thunder.jit(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)), transforms=[tz.ZeroTransform(stage=2)])

"""Submodules that cannot be sharded are refused by path, with what to do, before sharding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel

import thunder_zero as tz
from tests.harness.errors import refused
from thunder_zero.capture.refusals import PARTS

import thunder

CPU = torch.device("cpu")
X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


def shard(module: nn.Module) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])


PARTS_REFUSED: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (lambda: checkpoint(nn.Linear(4, 4)), ("_composable.checkpoint", "torch.utils.checkpoint")),
    (lambda: nn.Embedding(4, 4, max_norm=1.0), ("has max_norm", "normalise the rows in forward")),
    (lambda: nn.EmbeddingBag(4, 4, sparse=True, mode="sum"), ("has sparse=True", "use sparse=False")),
    (lambda: nn.DataParallel(nn.Linear(4, 4)), ("is a DataParallel", "inside of it")),
    (lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), ("is a DistributedDataParallel", "inside")),
    (lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU), ("is under FSDP1", "inside of it")),
    (lambda: torch.jit.script(nn.Linear(4, 4)), ("ScriptModule", "before torch.jit.script")),
]


@pytest.mark.filterwarnings("ignore")
def test_submodules_that_cannot_be_sharded_are_refused() -> None:
    missed = set(PARTS)
    for make, words in PARTS_REFUSED:
        module = nn.Sequential()
        module.add_module("first", nn.Linear(4, 4))
        module.add_module("part", make())
        before = dict(module.named_parameters())
        with refused(RuntimeError, "submodule 'part", "of Sequential", *words):
            shard(module)
        assert all(param is before[name] for name, param in module.named_parameters()), "nothing was sharded"
        missed -= {part for part in PARTS if any(map(part.matches, module.modules()))}
    assert not missed, "every row has a case"
    with refused(RuntimeError, "'1.weight' of Sequential is a lazy module's", "with a batch before sharding"):
        shard(nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))

"""Submodules that Thunder gets wrong or cannot trace are refused by path, with what to do, before sharding."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint as recompute

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.tiers import slow
from thunder_zero.frontends.refusals import PARTS

import thunder

CPU = torch.device("cpu")
X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


def shard(module: nn.Module) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=3)])


def make_compiled() -> Any:
    return torch.compile(nn.Linear(4, 4), backend="eager")


def make_hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return module


def make_normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(4, 4))


# Thunder by itself silently does not call backward hooks and does not update the statistics of instance norms. For
# the other parts it raises errors that do not say what to do.
PARTS_REFUSED: list[tuple[Callable[[], nn.Module], tuple[str, ...]]] = [
    (make_compiled, ("(OptimizedModule) is under torch.compile", "without torch.compile")),
    (lambda: checkpoint(nn.Linear(4, 4)), ("_composable.checkpoint", "torch.utils.checkpoint")),
    (make_hooked, ("(Linear) has backward hooks", "never calls them", "model.parameters()")),
    (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
        ("track_running_stats=True", "does not update", "track_running_stats=False"),
    ),
    (lambda: nn.SyncBatchNorm(4), ("(SyncBatchNorm)", "each rank's own")),
    (lambda: nn.Embedding(4, 4, max_norm=1.0), ("has max_norm", "normalise the rows in forward")),
    (lambda: nn.EmbeddingBag(4, 4, sparse=True, mode="sum"), ("has sparse=True", "use sparse=False")),
    (lambda: nn.DataParallel(nn.Linear(4, 4)), ("is a DataParallel", "inside of it")),
    (lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), ("is a DistributedDataParallel", "inside")),
    (lambda: FullyShardedDataParallel(nn.Linear(4, 4), device_id=CPU), ("is under FSDP1", "inside of it")),
    (lambda: torch.jit.script(nn.Linear(4, 4)), ("ScriptModule", "before torch.jit.script")),
]


@pytest.mark.filterwarnings("ignore")
def test_submodules_that_thunder_gets_wrong_are_refused() -> None:
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


# Thunder's own error is clear enough here; a sentence that names tz.compile is added.
UNTRACEABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "LSTM": (lambda: nn.LSTM(4, 4), "Encountered exception TypeError: weak object has gone away; thunder_zero.compile"),
    "old weight_norm": (make_normed(nn.utils.weight_norm), "torch._weight_norm, but it is not yet supported; thunder"),
    "weight_norm": (make_normed(parametrizations.weight_norm), "object of type 'generator' has no len(); thunder_zero"),
    "spectral_norm": (make_normed(parametrizations.spectral_norm), "normalize: out is not None"),
    "old spectral_norm": (make_normed(nn.utils.spectral_norm), "normalize: out is not None"),
    "a cumulative average": (lambda: nn.BatchNorm1d(4, momentum=None), "casting a TensorProxy to a Python float"),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, dropout=0.0), "doing automatic registration for"),
}


@pytest.mark.parametrize("part", ["LSTM", "old weight_norm", *slow(*list(UNTRACEABLE)[2:])])
@pytest.mark.filterwarnings("ignore")
def test_errors_of_thunder_lead_to_compile(part: str) -> None:
    make, words = UNTRACEABLE[part]
    model = shard(nn.Sequential(nn.Linear(4, 4), make()))
    with refused(NotImplementedError, "Thunder cannot trace Sequential: ", words, "compile(module, ...) trains it"):
        model(X)


Line = Callable[[Any, Tensor], Any]


class WithLine(nn.Module):
    """A module whose forward runs one more line."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.layer, self.norm, self.line = nn.Linear(4, 4), nn.BatchNorm1d(4), line
        self.count, self.last = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm.forward(self.layer.forward(x))
        output = self.line(self, y)
        return output if isinstance(output, Tensor) else y


class Record:
    word: str | None = None


class Records(nn.Module):
    """A module that sets an attribute of an object that it holds, as modules of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.record = Record()

    def forward(self, x: Tensor) -> Tensor:
        self.record.word = "a"
        return self.layer.forward(x)


LINES: dict[str, tuple[Line, tuple[str, ...]]] = {
    "a counter": (
        lambda module, y: setattr(module, "count", module.count + 1),
        ("attribute 'count'", "WithLine", "in a buffer"),
    ),
    "a tensor": (lambda module, y: setattr(module, "last", y.mean()), ("attribute 'last'", "return the value")),
    "a new attribute": (lambda module, y: setattr(module, "other", 1), ("attribute 'other'", "drop the change")),
    "a reentrant checkpoint": (
        lambda module, y: recompute(module.layer, y, use_reentrant=True),
        ("use_reentrant=True", "cannot trace; pass use_reentrant=False"),
    ),
}


@pytest.mark.parametrize("name", ["a counter", "a reentrant checkpoint", *slow("a tensor", "a new attribute")])
def test_lines_of_forward_that_thunder_gets_wrong_are_refused(name: str) -> None:
    line, words = LINES[name]
    with refused(RuntimeError, *words):
        shard(WithLine(line))(X)
    with refused(RuntimeError, *words):
        tz.trace(WithLine(line), X, frontend="thunder")


def run_allowed_lines(module: Any, y: Tensor) -> Tensor:
    """Set an attribute to its value, set one of a submodule, and call a checkpoint that is not reentrant."""
    module.count = 0
    module.layer.count = 3
    return recompute(module.layer, y, use_reentrant=False)


@pytest.mark.slow
def test_similar_lines_are_allowed() -> None:
    module = WithLine(run_allowed_lines)
    model = shard(deepcopy(module))
    torch.testing.assert_close(model(X), module(X))


def test_plain_models_keep_thunders_behaviour() -> None:
    """Thunder silently drops a counter, and raises a string for a reentrant checkpoint."""
    shard(nn.Linear(4, 4))  # our functions are now in Thunder's tables
    plain: Any = thunder.jit(WithLine(LINES["a counter"][0]))
    plain(X)
    assert plain.count == 0
    with pytest.raises(TypeError, match="exceptions must derive from BaseException"):
        thunder.jit(WithLine(LINES["a reentrant checkpoint"][0]))(X)


@pytest.mark.slow
def test_temporary_changes_are_refused_and_leave_nothing_behind() -> None:
    """``update_bn``, ``functional_call`` and a changed part raise; once undone, the model works as before."""
    model = shard(WithLine(lambda module, y: None))
    before = model(X)
    with refused(NotImplementedError, "Thunder cannot trace WithLine", "thunder_zero.compile"):
        update_bn([X], model)
    with refused(NotImplementedError, "Thunder cannot trace Records: trying to set .word; thunder_zero.compile"):
        shard(Records())(X)
    model.plain.norm.momentum = 0.1
    with refused(RuntimeError, "parameter 'layer.weight' was replaced", "torch.func.functional_call"):
        functional_call(model, {"layer.weight": torch.ones(4, 4)}, (X,))
    torch.testing.assert_close(model(X), before)
    rows, indices = nn.Embedding(4, 4), torch.tensor([[0, 3]])
    model = shard(nn.Sequential(rows, nn.Linear(4, 4)))
    before = model(indices)
    rows.sparse = True  # Thunder reads it and compiles again
    with refused(RuntimeError, "submodule '0' of Sequential (Embedding) has sparse=True", "use sparse=False"):
        model(indices)
    rows.sparse = False
    assert torch.equal(model(indices), before)

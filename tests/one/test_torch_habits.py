"""Usual calls of torch, FSDP2 and Hugging Face work on a sharded model, or raise an error that says what to do.

Afterwards the model still trains.
"""

from __future__ import annotations

import inspect
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import thunder_zero as tz
from tests.harness.errors import fails, refused
from tests.harness.models import fresh, saved, trains
from thunder_zero.plan.from_fsdp2 import INSTEAD, ROWS
from thunder_zero.plan.policy import Policy

import thunder

X = torch.ones(3, 4)
pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """A module with the functions of a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))

    def generate(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)

    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), folder)


@pytest.fixture
def model() -> Iterator[Any]:
    sharded = tz.compile(fresh(Net), 3)
    assert trains(sharded, X)
    yield sharded
    assert trains(sharded, X), "the model still trains"


def train_in_anomaly_mode(model: Any) -> None:
    with torch.autograd.detect_anomaly():
        model(X).sum().backward()


REFUSED: list[tuple[type[Exception], Callable[[Any], Any], str]] = [
    (TypeError, lambda model: torch.save(model, BytesIO()), "tz.save(path, model, optimizer)"),
    (TypeError, pickle.dumps, "tz.full_state_dict(model)"),
    (AttributeError, lambda model: model.generate(X), "with tz.full_parameters(model) as module: module.generate"),
    (AttributeError, lambda model: model.save_pretrained("folder"), "tz.save_pretrained(model, folder)"),
    (RuntimeError, fully_shard, "unit_of names the units"),
    (RuntimeError, lambda model: fully_shard(model.a), "submodule 'a' of a Net"),
    (RuntimeError, lambda model: torch.export.export(model, (X,)), "with tz.full_parameters(model) as module"),
    (
        RuntimeError,
        lambda model: functional_call(model, {name: torch.ones(4) for name in ("a.bias", "b.bias")}, (X,)),
        "functional_call",
    ),
    (RuntimeError, train_in_anomaly_mode, "check_gradients=True"),
]


def test_refusals_name_what_to_do_instead(model: Any) -> None:
    for kind, call, instead in REFUSED:
        with refused(kind, "Net" if instead != "functional_call" else "a.bias", instead):
            call(model)
    fails(lambda: torch.export.export(model, (X,), strict=True), "Unsupported", "with tz.full_parameters(model) as")


def test_what_refusals_name_works(model: Any) -> None:
    expected = model(X)
    with tz.full_parameters(model) as module:
        assert module.generate(X).shape == X.shape[:1]
        assert torch.equal(torch.export.export(module, (X,)).module()(X), module(X))
        torch.testing.assert_close(functional_call(module, dict(module.named_parameters()), (X,)), expected)
    torch.testing.assert_close(functional_call(model, dict(model.named_parameters()), (X,)), expected)
    saved = BytesIO()
    torch.save(model.state_dict(), saved)
    with torch.autograd.detect_anomaly(check_nan=False):
        model(X).sum().backward()


def test_methods_of_fsdp2_raise_errors_that_name_ours(model: Any) -> None:
    names = [name for name in vars(FSDPModule) if not name.startswith("_")]
    for name in names:
        assert not hasattr(model, name)
        with refused(AttributeError, name, "FSDP2", INSTEAD[name]):
            getattr(model, name)(True)
    fails(lambda: model.set_nothing(), "AttributeError", "object has no attribute 'set_nothing'")


@pytest.mark.parametrize(
    "entry",
    [
        tz.compile,
        lambda module, **options: thunder.jit(module, transforms=[tz.ZeroTransform(**options)]),
        lambda module, **options: tz.zero(thunder.jit(module), **options),
    ],
)
def test_arguments_of_fsdp2_raise_errors_that_name_ours(entry: Callable[..., Any]) -> None:
    ours = ("module", "mesh", "dp_mesh_dims")
    names = [name for name in inspect.signature(fully_shard).parameters if name not in ours]
    for name in names:
        if name not in inspect.signature(Policy).parameters:
            with refused(TypeError, name, "FSDP2", INSTEAD[name]):
                entry(Net(), **{name: True})
    assert "reshard_after_forward" in names, "a field of Policy"


def test_a_name_of_fsdp2_has_one_row() -> None:
    assert [name for name, rows in Counter(name for row in ROWS for name in row.names).items() if rows > 1] == []


class Checkpointed(nn.Module):
    """A module with one block, which is checkpointed with these options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(4, 4), options

    def block(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.layer(x)).exp() * scale
        return y if mask is None else y * mask

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, mask=x > 2, use_reentrant=False, **self.options)


OPTIONS = {"preserve_rng_state": False, "determinism_check": "none", "early_stop": False}


def test_checkpoints_take_keyword_arguments() -> None:
    plain, x = fresh(lambda: Checkpointed(scale=3.0, **OPTIONS)), torch.arange(12.0).reshape(3, 4)
    model = tz.compile(deepcopy(plain), 3)
    y = model(x)
    expected = plain(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), plain_param.grad)
    assert len(saved(tz.traces_of(model).forward)) < 6, "backward computes the block again"


def null_contexts() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


def test_a_context_fn_of_a_checkpoint_is_refused() -> None:
    with refused(RuntimeError, "context_fn", "Policy.recompute"):
        tz.compile(Checkpointed(context_fn=null_contexts), 3)(X)


def save_tanh(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_tanh = operator is torch.ops.aten.tanh.default
    return CheckpointPolicy.MUST_SAVE if is_tanh else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [[torch.ops.aten.tanh.default], save_tanh], ids=["list", "function"])
def test_selective_checkpoints(policy: Any) -> None:
    """Backward recomputes everything except what the policy saves."""
    plain = fresh(lambda: Checkpointed(context_fn=partial(create_selective_checkpoint_contexts, policy)))
    model, x = tz.compile(deepcopy(plain), 3), torch.arange(12.0).reshape(3, 4)
    for network in (model, plain):
        network(x).sum().backward()
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), plain_param.grad)
    counts = Counter(line.sym.name for line in tz.traces_of(model).backward.bound_symbols)
    assert (counts["exp"], counts["tanh"], counts["addmm"]) == (1, 0, 0), counts


def test_traces_fit_a_screen() -> None:
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            text = repr(tz.trace(nn.Sequential(*(Net() for _ in range(4))), X, world_size=2, policy=3))
        assert len(text) < 500
        assert text.count("\n") == 1 + grad
        assert "ZeRO-3, rank 0 of 2, 16 parameters in 4 units" in text

"""What users do to the plain module after it was sharded: refused in the act, or before the next forward."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.tiers import slow
from thunder_zero.runtime.placeholders import Placeholder

import thunder

X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """Methods beside forward, a scalar parameter, an ignored one, buffers of the module and of a submodule."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.ignored = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.zeros(4))
        self.bound = 2.0

    def features(self, x: Tensor) -> Tensor:
        return self.first.forward(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.features(x))
        self.offset = self.offset + 1
        return y * self.ignored * self.bound + self.offset

    def generate(self, x: Tensor) -> Tensor:
        return self(x)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def shard(module: nn.Module, stage: int = 3) -> Any:
    return thunder.jit(module, transforms=[tz.ZeroTransform(stage=stage, ignored=("ignored",))])


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


@torch.no_grad()
def in_no_grad(call: Callable[[], Any]) -> Any:
    return call()


Attempt = Callable[[Any, Any], Any]  # given the plain module and the sharded one

COMPUTES: dict[str, Attempt] = {
    "a method of the sharded model": lambda plain, model: model.features(X),
    "a method of the plain module": lambda plain, model: plain.features(X),
    "generate": lambda plain, model: model.generate(X),
    "a submodule": lambda plain, model: model.get_submodule("first")(X),
    "the plain module": lambda plain, model: plain(X),
    "without gradients": lambda plain, model: in_no_grad(lambda: plain.features(X)),
    "an operator": lambda plain, model: X @ plain.first.weight,
    "aten": lambda plain, model: torch.ops.aten.mul(plain.first.weight, 2),
    "__dlpack__": lambda plain, model: torch.from_dlpack(plain.first.weight),
    "a list": lambda plain, model: torch.cat([X, plain.first.weight]),
    "item": lambda plain, model: plain.scale.item(),
    "tolist": lambda plain, model: plain.first.weight.tolist(),
    "numpy": lambda plain, model: plain.first.weight.data.numpy(),
    "an index": lambda plain, model: plain.first.weight[0],
    "equality": lambda plain, model: plain.first.weight == 1,
    "truth": lambda plain, model: bool(plain.scale),
    "detach": lambda plain, model: plain.scale.detach(),
    "clone of .data": lambda plain, model: plain.scale.data.clone(),
    "storage": lambda plain, model: plain.scale.untyped_storage(),
    "state_dict": lambda plain, model: plain.state_dict(),
    "copy_ from it": lambda plain, model: torch.empty(4, 4).copy_(plain.first.weight.data),
    "a hook": lambda plain, model: plain.scale.register_post_accumulate_grad_hook(print),
    "a collective": lambda plain, model: dist.all_reduce(plain.scale.data),
    "parameters_to_vector": lambda plain, model: nn.utils.parameters_to_vector(plain.parameters()),
    "an average of weights": lambda plain, model: AveragedModel(plain).update_parameters(plain),
    "register_parametrization": lambda plain, model: parametrize.register_parametrization(
        plain.first, "weight", Twice()
    ),
    "weight_norm": lambda plain, model: parametrizations.weight_norm(plain.first),
    "l1_unstructured": lambda plain, model: prune.l1_unstructured(plain.first, "weight", 1),
    "prune.identity": lambda plain, model: prune.identity(plain.first, "weight"),
    "torch.jit.trace": lambda plain, model: torch.jit.trace(plain.first, X),
}

WRITES: dict[str, Attempt] = {
    "apply": lambda plain, model: model.apply(initialise),
    "apply to the plain module": lambda plain, model: plain.apply(initialise),
    "reset_parameters": lambda plain, model: plain.first.reset_parameters(),
    "fill_": lambda plain, model: in_no_grad(lambda: plain.scale.fill_(1)),
    "+=": lambda plain, model: in_no_grad(lambda: plain.scale.__iadd__(1)),
    ".data.zero_": lambda plain, model: plain.scale.data.zero_(),
    ".data.copy_": lambda plain, model: plain.first.weight.data.copy_(torch.ones(4, 4)),
    ".data =": lambda plain, model: setattr(plain.scale, "data", torch.tensor(2.0)),
    "an index": lambda plain, model: plain.first.weight.__setitem__(0, 1.0),
    "out=": lambda plain, model: torch.add(X, 1, out=plain.first.weight),
    "foreach": lambda plain, model: torch._foreach_mul_([plain.scale.data], 2.0),
    "load_state_dict": lambda plain, model: plain.load_state_dict(Net().state_dict()),
}

CONVERTS: dict[str, Attempt] = {
    "half of the model": lambda plain, model: model.half(),
    "half": lambda plain, model: plain.half(),
    "to a dtype": lambda plain, model: model.to(torch.float64),
    "to a device": lambda plain, model: model.to("meta"),
    "to_empty": lambda plain, model: model.to_empty(device="cpu"),
    "a submodule": lambda plain, model: plain.first.bfloat16(),
    "type": lambda plain, model: plain.scale.type(torch.int32),
}

FREEZES: dict[str, Attempt] = {
    "the plain module": lambda plain, model: plain.requires_grad_(False),
    "a parameter": lambda plain, model: setattr(plain.scale, "requires_grad", False),
}

GRADIENTS: dict[str, Attempt] = {
    "clip_grad_norm_": lambda plain, model: nn.utils.clip_grad_norm_(plain.parameters(), 1.0),
    "zero_grad": lambda plain, model: plain.zero_grad(),
    "an optimizer's zero_grad": lambda plain, model: torch.optim.SGD(plain.parameters()).zero_grad(),
    "setting one": lambda plain, model: setattr(plain.scale, "grad", torch.tensor(1.0)),
}

IN_THE_ACT: dict[str, tuple[dict[str, Attempt], tuple[str, ...]]] = {
    "computes": (COMPUTES, ("cannot use parameter '", "call that model", "full_parameters")),
    "writes": (WRITES, ("cannot write to parameter '", "before thunder.jit", "load_original_state_dict")),
    "converts": (CONVERTS, ("be moved or cast", "call .to() on the module before thunder.jit")),
    "freezes": (FREEZES, ("requires_grad of parameter '", "planned as True", "before thunder.jit")),
    "gradients": (GRADIENTS, ("has no gradient", "model.zero_grad()")),
}


def sets(name: str, value: Callable[[], Any], part: str = "") -> Attempt:
    return lambda plain, model: setattr(plain.get_submodule(part), name, value())


AFTERWARDS: list[tuple[Attempt, str]] = [
    (sets("offset", lambda: torch.ones(4)), "buffer 'offset' was replaced"),
    (sets("running_mean", lambda: torch.ones(4), "norm"), "buffer 'norm.running_mean' was replaced"),
    (lambda plain, model: setattr(model, "offset", torch.ones(4)), "buffer 'offset' was replaced"),
    (lambda plain, model: setattr(model, "bound", 3.0), "attribute 'bound' was replaced"),
    (sets("weight", lambda: nn.Parameter(torch.ones(4, 4)), "first"), "parameter 'first.weight' was replaced"),
    (sets("ignored", lambda: nn.Parameter(torch.zeros(4))), "parameter 'ignored' was replaced"),
    (sets("extra", lambda: nn.Parameter(torch.ones(4)), "first"), "submodule 'first' got the parameter 'extra'"),
    (sets("extra", nn.Tanh), "the module got the submodule 'extra'"),
    (lambda plain, model: delattr(plain, "scale"), "parameter 'scale' was replaced"),
    (lambda plain, model: plain.load_state_dict(Net().state_dict(), assign=True), "was replaced"),
]


@pytest.mark.parametrize("stage", [3, *slow(0, 1, 2)])
def test_a_placeholder_that_is_used(stage: int) -> None:
    """It raises, and nothing has changed: the model is whole for its next forward."""
    for kind, (attempts, words) in IN_THE_ACT.items():
        for name, attempt in attempts.items():
            plain = Net()
            model = shard(plain, stage)
            with pytest.raises((RuntimeError, TypeError)) as caught:
                attempt(plain, model)
            assert not [word for word in words if word not in str(caught.value)], (kind, name, str(caught.value))
            for hook in model._forward_pre_hooks.values():
                hook(model, (), {})


def test_dlpack_without_torch_functions() -> None:
    """``to_dlpack`` is C++ and asks no ``__torch_function__``: no stale values, but NaN."""
    plain = Net()
    shard(plain)
    for tensor in (plain.first.weight, plain.scale.data):
        assert torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).isnan().all()


def test_what_is_found_before_the_next_forward() -> None:
    for change, words in AFTERWARDS:
        plain = Net()
        model = shard(plain)
        change(plain, model)
        with refused(RuntimeError, words, "after thunder_zero sharded"):
            model(X)


def test_what_may_be_done_with_the_plain_module() -> None:
    """Looks, copies and conversions that change nothing; both modules have the buffer that forward assigns."""
    plain = Net()
    eager = deepcopy(plain)
    model = shard(plain)
    weight = plain.first.weight
    assert (weight.shape, weight.dtype, weight.numel(), weight.is_leaf) == ((4, 4), torch.float32, 16, True)
    assert repr(weight) == "Placeholder('first.weight', shape=(4, 4), dtype=torch.float32, device=cpu)"
    assert torch.equal(torch.zeros_like(weight), torch.zeros(4, 4))
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    for copy in (deepcopy(plain), pickle.loads(pickle.dumps(plain)), torch.load(file, weights_only=False)):
        assert isinstance(copy.first.weight, Placeholder)
        with refused(RuntimeError, "parameter 'scale' has no values", "Net is a copy of a module that was sharded"):
            shard(copy)
    model.to("cpu").float().train()
    plain.requires_grad_(True).train()
    for _ in range(2):
        found, expected = model(X), eager(X)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        assert torch.equal(plain.offset, eager.offset)
        assert plain.offset is model.get_buffer("offset")
        assert list(model.state_dict()) == [*dict(model.named_parameters()), *dict(eager.named_buffers())]
    plain.offset = torch.zeros(4)
    with refused(RuntimeError, "buffer 'offset' was replaced"):
        model(X)

"""A sharded model refuses changes, wrong optimizers, and programs that would train wrongly; then it still trains.

Refusals before a module is sharded are in ``test_bad_input.py``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import full, is_plain, trains
from tests.harness.tiers import slow
from thunder_zero.sharded.dtensors import local

import thunder

X = torch.ones(3, 4)
pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """Two layers, tied on request; returns ``give`` of its output and its second weight."""

    def __init__(self, give: Callable[[Tensor, Tensor], Any] = lambda y, w: y, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.give = nn.Linear(4, 4), nn.Linear(4, 4), give
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.give(self.b.forward(torch.tanh(self.a.forward(x))), self.b.weight)


def shard(module: nn.Module | None = None, **arguments: Any) -> Any:
    return thunder.jit(module or Net(), transforms=[tz.ZeroTransform(**arguments)])


# A second transform

SECOND: list[tuple[Callable[[Any, Any], Any], str]] = [  # calls with the plain and the sharded module
    (lambda module, model: shard(module), "already transformed by ZeroTransform"),
    (lambda module, model: shard(module.a), "already transformed by ZeroTransform"),
    (lambda module, model: tz.zero(thunder.jit(module)), "already transformed by ZeroTransform"),
    (lambda module, model: shard(model), "already jitted"),
    (lambda module, model: tz.zero(model), "as well"),
    (lambda module, model: thunder.compile(module, plugins="zero1", recipe=tz.Recipe()), "already transformed"),
    (lambda module, model: thunder.distributed.ddp(model), "as well"),
    (lambda module, model: thunder.distributed.fsdp(model, device=torch.device("cpu")), "as well"),
]


def test_a_second_transform_is_refused_and_changes_nothing() -> None:
    transform, module, second = tz.ZeroTransform(), Net(), Net()
    expected = deepcopy(module)(X)
    model = thunder.jit(module, transforms=[transform])
    for call, words in SECOND:
        with refused(RuntimeError, words):
            call(module, model)
    with refused(RuntimeError, "the ZeroTransform given for Net already shards a module", "a new ZeroTransform"):
        thunder.jit(second, transforms=[transform])
    assert is_plain(second)
    assert torch.equal(model(X), expected), "the model keeps its weights"
    assert trains(model, X)


def test_a_module_whose_sharded_model_is_gone_is_refused() -> None:
    # As when a notebook cell runs twice: the module has NaN, because the first model took its weights.
    module = Net()
    before = list(module.parameters())
    shard(module)
    gc.collect()
    with refused(RuntimeError, "Net is already transformed by ZeroTransform", "build a new module"):
        shard(module)
    before[0].grad = torch.ones_like(before[0])
    value = before[0].detach().clone()
    torch.optim.SGD(before, lr=1.0).step()
    assert torch.equal(before[0], value - 1), "its old parameters are ordinary parameters"


def test_a_transform_after_the_first_call_is_refused() -> None:
    module = Net()
    model = thunder.jit(module)
    expected = model(X)
    with refused(RuntimeError, "Net was called before", "right after thunder.jit"):
        tz.zero(model)
    assert torch.equal(model(X), expected), "the model is as it was"
    assert not any(param.isnan().any() for param in tz.zero(thunder.jit(module)).parameters())


def test_wrappers_and_function_transforms_of_a_sharded_model_are_refused() -> None:
    # DDP, for example, would copy rank 0's rows to all ranks.
    model = shard()
    before = [param.detach().clone() for param in model.parameters()]
    with refused(RuntimeError, "DistributedDataParallel", "Net that thunder_zero trains", "train the model without it"):
        nn.parallel.DistributedDataParallel(model)
    assert all(map(torch.equal, before, model.parameters()))
    scripts: tuple[Callable[[Any], object], ...] = (torch.jit.script, lambda module: torch.jit.trace(module, X))
    for script in scripts:
        with refused(RuntimeError, "torch.jit cannot look into the compiled programs of Net", "tz.full_parameters"):
            script(model)
    with refused(TypeError, "thunder.jit was given a function that calls Net", "not jitted"):
        thunder.jit(lambda x: model(x) * 2)(X)
    for call in (torch.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        with refused(RuntimeError, "Net was called inside of torch.func or vmap", "torch.autograd.grad"):
            call(lambda x: model(x))(X)
    assert trains(model, X)


@pytest.mark.slow  # Dynamo takes long to load
def test_torch_compile_leaves_a_sharded_model_to_thunder() -> None:
    model = shard()
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), model(X))


# The optimizer


@pytest.mark.parametrize("stage", [3, *slow(0, 1)])
def test_an_optimizer_of_the_plain_modules_parameters_is_refused(stage: int) -> None:
    module = Net()
    before = list(module.parameters())
    model = shard(module, stage=stage)
    after: list[nn.Parameter] = list(model.parameters())
    groups: dict[str, tuple[list[Any], str]] = {
        "before": (before, "a.weight"),
        "groups that mix": ([{"params": after[:2]}, {"params": after[2:3] + before[3:]}], "b.bias"),
    }
    model(X).sum().backward()
    for name, (params, path) in groups.items():
        optimizer = torch.optim.AdamW(params, lr=0.1)
        for param in before:
            param.grad = torch.ones_like(param)
        params_and_shards = [*before, *after]
        values = [local(param).clone() for param in params_and_shards]
        with refused(RuntimeError, "AdamW", path, "model.parameters()"):
            optimizer.step()
        assert all(map(torch.equal, map(local, params_and_shards), values)), name
        assert not optimizer.state, name
    model.zero_grad()
    assert trains(model, X)


# Changes after the transform

Undo = Callable[[], Any]


def set_and_undo(owner: Any, name: str, value: Any) -> Undo:
    old = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, old)


def assign(module: Any, model: Any) -> Undo:
    old = module.state_dict(keep_vars=True)
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    return lambda: module.load_state_dict(old, assign=True)


def with_data(make: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], Undo]:
    def change(module: Any, model: Any) -> Undo:
        shard = model.get_parameter("b.weight")
        return set_and_undo(shard, "data", make(shard.data))

    return change


REPLACED = ("parameter 'b.weight' was replaced", "copy new values")
CHANGES: list[tuple[Callable[[Any, Any], Undo], tuple[str, ...]]] = [
    (lambda module, model: set_and_undo(module.b, "weight", nn.Parameter(torch.randn(4, 5))), REPLACED),
    (lambda module, model: set_and_undo(module, "b", nn.Linear(4, 4)), REPLACED),
    (lambda module, model: set_and_undo(model, "b", nn.Linear(4, 4)), REPLACED),
    (assign, ("parameter 'a.weight' was replaced", "load_original_state_dict")),
    (with_data(Tensor.half), ("'b.weight' was moved or cast: it is torch.float16 on cpu", "as torch.float32 on cpu")),
    (with_data(lambda rows: rows[:2]), ("'b.weight' was replaced (.data = ...)", "(2, 4)", "(4, 4)", "in place")),
]


def test_a_changed_model_is_refused_until_the_change_is_undone() -> None:
    module = Net()
    expected = deepcopy(module)(X)
    model = shard(module)
    for moment in ("before the first call", "between calls"):
        for change, words in CHANGES:
            undo = change(module, model)
            for _ in range(2):
                with refused(RuntimeError, *words):
                    model(X)
            undo()
        assert torch.equal(model(X), expected), moment
    assert trains(model, X)
    assert thunder.cache_misses(model) == 1, "nothing was compiled for a changed model"


def test_new_memory_behind_a_zero1_shard_and_an_untied_parameter_are_refused() -> None:
    # Under ZeRO-1 a shard is a view: new memory would be trained, but no gather would read it.
    module = Net(tied=True)
    model = shard(module, stage=1)
    undo = with_data(Tensor.clone)(None, model)
    with refused(RuntimeError, "memory of parameter 'a.weight' was replaced", ".data", "in place"):
        model(X)
    undo()
    assert trains(model, X)
    module.b.weight = nn.Parameter(torch.randn(4, 4))
    with refused(RuntimeError, "parameter 'b.weight' was replaced"):
        model(X)


# Outputs of forward

RETURNS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda y, w: {"y": (y, [w])},
    lambda y, w: (y, w.float()),  # this cast changes nothing
]


def test_a_forward_that_returns_a_parameter_is_refused() -> None:
    for give in RETURNS[:1]:
        with refused(RuntimeError, "forward returns the parameter 'b.weight' itself", "full_state_dict"):
            tz.trace(Net(give), X, policy=tz.ZERO1)
    with refused(RuntimeError, "forward returns the parameter 'a.weight' itself", "full_state_dict"):
        shard(Net(RETURNS[0], tied=True))(X)


def test_forward_may_return_a_value_computed_from_a_parameter() -> None:
    functions = (torch.clone, torch.t, torch.detach, Tensor.contiguous, Tensor.half)
    module = Net(lambda y, w: (y, *(make(w) for make in functions)))
    traces = tz.trace(module, X, world_size=4)
    shapes = [tuple(output.shape) for output in traces.forward.output[0]["flat_output"]]
    assert shapes == [(3, 4), *[(4, 4)] * len(functions)]


# Second derivatives


@dataclass
class Boxed:
    y: Tensor


class Returns(nn.Module):
    """Returns outputs in several structures, with a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.layer.forward(x))
        return {"deep": [y, (y * 2, x)], "view": y.t(), "dataclass": Boxed(y * 3)}


TAKES: list[Callable[[Any], Tensor]] = [
    lambda output: output["deep"][0],
    lambda output: output["deep"][1][0],
    lambda output: output["view"],
    lambda output: output["dataclass"].y,
]
DOUBLE: list[Callable[[Callable[[Tensor], Tensor], Tensor, list[Tensor]], Any]] = [
    lambda f, x, params: f(x).sum().backward(create_graph=True),
    lambda f, x, params: torch.autograd.grad(f(x).sum(), x, create_graph=True),
    lambda f, x, params: torch.autograd.grad(f(x).sum(), params, create_graph=True),
    lambda f, x, params: torch.autograd.functional.hessian(lambda x: f(x).sum(), x),
]


def test_a_second_derivative_is_refused_and_the_next_step_is_right() -> None:
    # Plain Thunder returns a gradient without a graph, so a penalty on it trains nothing.
    plain = Returns()
    model = shard(deepcopy(plain))
    x = torch.randn(2, 3).requires_grad_()
    for take in TAKES:
        for double in DOUBLE:
            with refused(RuntimeError, "cannot differentiate the backward of Returns", "create_graph=True"):
                double(lambda x, take=take: take(model(x)), x, list(model.parameters()))  # type: ignore[misc]
        jacobians = []
        for network in (model, plain):
            network.zero_grad()
            take(network(x)).square().sum().backward()
            jacobians.append(torch.autograd.functional.jacobian(lambda x, f=network, take=take: take(f(x)), x))
        torch.testing.assert_close(*jacobians)
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), expected.grad)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    # The step after it: tests/ranks/test_bad_input.py.
    model = shard(nn.Linear(4, 2), check_gradients=True)
    with refused(RuntimeError, "gradient of parameter 'weight' is NaN or Inf", "check_gradients", "no .grad"):
        model(X * float("nan")).sum().backward()

"""Under ``tz.compile``, unusual values and effects in torch's graphs work as in eager mode, or are refused.

Effects ordered by tokens, asserts, tensor subclasses, nested tensors, gradients inside forward, parameters that forward
writes to or returns, and torch's own errors.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import thunder_zero as tz
from tests.harness.eager import assert_same_as_eager
from tests.harness.errors import refused
from tests.harness.models import fresh
from tests.harness.tiers import slow

TORCH_2_13 = torch.__version__.startswith("2.13")
X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")
Function = Callable[[Any, Tensor], Any]


class Calls(nn.Module):
    """A module whose forward is a given function of the module and the input."""

    def __init__(self, then: Function) -> None:
        super().__init__()
        self.layer, self.scale, self.then = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), then
        self.register_buffer("last", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.then(self, x)


def prints_text(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    torch.ops.higher_order.print("rows: {}", 3)
    torch.ops.aten._print("said")
    return y * module.scale


def asserts(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    torch._assert_async((y.abs() < 100).all(), "too large")
    torch._check(len(y) == 3)
    assert y.abs().max() < 100
    return y * module.scale


def copies(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    module.last.copy_(y.detach().mean(0))
    return y * module.last * module.scale


def inner_gradient(module: Any, x: Tensor) -> Tensor:
    grad: Tensor = torch.func.grad(lambda z: (module.layer(z) * module.scale).square().sum())(x)
    return grad.sin()


def equal_gradients(module: Any, x: Tensor) -> Tensor:
    """Add ``scale`` and the bias, whose gradients are the same value of the graph."""
    y: Tensor = module.layer(x) + module.scale
    return y


def transposed_norm(module: Any, x: Tensor) -> Tensor:
    """Call a CPU kernel whose result has the input's memory layout, while torch's trace has the batch first."""
    channels = module.layer(x.expand(2, 3, 4)).transpose(1, 2)
    normal = torch.nn.functional.batch_norm(channels, None, None, training=True)
    rows: Tensor = module.layer(normal.transpose(1, 2)) * module.scale
    return rows


def uses_nested(module: Any, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(module.layer(x) * module.scale, torch.tensor([0, 1, 3]))
    values: Tensor = torch.nn.functional.gelu(parts).values()
    return values


def uses_cond(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    z: Tensor = torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z.sin(), (y,))
    return z * module.scale


def test_forward_prints_and_backward_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    model = tz.compile(fresh(partial(Calls, prints_text)), 3)
    capfd.readouterr()
    output = model(X)
    assert capfd.readouterr().out.splitlines() == ["rows: 3", "said"]
    output.sum().backward()
    assert not capfd.readouterr().out


@pytest.mark.parametrize(
    "then", [prints_text, asserts, copies, inner_gradient, equal_gradients, transposed_norm, uses_nested, uses_cond]
)
def test_it_trains_as_in_eager_mode(then: Function) -> None:
    assert_same_as_eager(fresh(partial(Calls, then)), X)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_assert_in_a_graph_raises_its_message_in_forward(mode: Callable[[], Any]) -> None:
    def fails(module: Any, x: Tensor) -> Tensor:
        torch._assert_async((x > 100).all(), "too small")
        y: Tensor = module.layer(x) * module.scale
        return y

    with pytest.raises(RuntimeError, match=r"^too small"), mode():
        tz.compile(fresh(partial(Calls, fails)), 3)(X)


class Beside(nn.Module):
    """A module that computes with a tensor subclass beside plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), (other * 2).sin()


def make_pair() -> Tensor:
    result: Tensor = TwoTensor(X.clone(), X.cos())
    return result.requires_grad_()


@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)], ids=str)
def test_tensor_subclasses_work_beside_parameters(used: tuple[int, ...]) -> None:
    plain = fresh(Beside)
    results = []
    for network in (tz.compile(deepcopy(plain), 3), plain):
        other: Any = make_pair()
        outputs = network(X, other)
        for index in used:
            outputs[index].sum().backward(retain_graph=True)
        results.append((outputs, other.grad))
    (actual, grad), (eager, expected) = results
    assert type(actual[1]) is TwoTensor
    torch.testing.assert_close((actual[0], actual[1].a, actual[1].b), (eager[0], eager[1].a, eager[1].b))
    if expected is None:
        assert not grad.a.any()
    else:
        torch.testing.assert_close((grad.a, grad.b), (expected.a, expected.b))


# Refusals


def writes(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.scale.view(2, 2)[0].mul_(2)
    y: Tensor = module.layer(x) * module.scale
    return y


def replaces(module: Any, x: Tensor) -> Tensor:
    module.scale.data = module.scale * 2
    y: Tensor = module.layer(x) * module.scale
    return y


def returns(module: Any, x: Tensor) -> Any:
    return {"out": module.layer(x), "of": [module.scale]}


def differentiates(module: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = (module.layer(x) * module.scale).square().sum()
    (grad,) = torch.autograd.grad(energy, x, create_graph=True)
    return grad


def mismatches(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x) @ torch.ones(3, 3)  # the error names this line
    return y


def applies_layer(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    return y


def make_jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


REFUSED: list[tuple[Function, Callable[[], Tensor], tuple[str, ...]]] = [  # function, input, words of the error
    (writes, X.clone, ("writes to parameter 'scale'",)),
    (replaces, X.clone, ("writes to parameter 'scale'",) if TORCH_2_13 else ("cannot trace Calls", "set_")),
    (returns, X.clone, ("returns the parameter 'scale' itself",)),
    (lambda module, x: module.scale, X.clone, ("returns the parameter 'scale' itself",)),
    (differentiates, X.clone, ("create_graph=True", "torch.func.grad")),
    (mismatches, X.clone, ("cannot trace Calls", "test_what_torch_hands_over.py:", "must have same reduction dim")),
    (applies_layer, make_pair, ("'layer.weight'", "tensor subclass", "plain tensor")),
    (applies_layer, make_jagged, ("cannot trace Calls", "nested", "padded")),
]


@pytest.mark.parametrize("index", range(len(REFUSED)))
@pytest.mark.parametrize("mode", [torch.enable_grad, *slow(torch.no_grad)])
def test_other_values_and_effects_are_refused(
    index: int, mode: Callable[[], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    then, make_input, words = REFUSED[index]
    if mode is torch.no_grad and (then is differentiates or make_input is make_pair):
        return  # these are refused only with gradients
    with refused(RuntimeError, *words), mode():
        tz.compile(fresh(partial(Calls, then)), 3)(make_input())
    assert "Traceback" not in capfd.readouterr().err


def test_calling_a_copy_of_a_model_is_refused() -> None:
    model = tz.compile(fresh(partial(Calls, applies_layer)), 3)
    copied = deepcopy(model)
    with refused(RuntimeError, "copy of a sharded Calls", "full_state_dict"):
        copied(X)
    with refused(RuntimeError, "copy of a sharded Calls"):
        deepcopy(copied)(X)
    assert len(copied.state_dict()) == len(model.state_dict())


def test_without_gradients_views_of_inputs_have_the_flags_of_eager() -> None:
    def views(module: Any, x: Tensor) -> Any:
        return x, x.view(-1), x.t()[1:], module.layer(x).view(-1), module.layer(x.t()[:4].t())

    plain = fresh(partial(Calls, views))
    outputs = []
    for network in (tz.compile(deepcopy(plain), 3), plain):
        x = X.clone().requires_grad_()
        with torch.no_grad():
            outputs.append(network(x))
    for actual, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(actual, expected)
        assert (actual.requires_grad, actual.grad_fn) == (expected.requires_grad, expected.grad_fn)

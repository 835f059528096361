"""What PyTorch's graphs hand over under ``tz.compile`` besides plain tensors: right, or refused in one sentence.

Effects that are ordered by tokens, asserts, tensor subclasses, nested tensors, gradients inside of forward, parameters
that forward writes to or returns, and errors of torch's own.
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

X = torch.arange(12.0).view(3, 4).sin()
pytestmark = pytest.mark.usefixtures("group")
Then = Callable[[Any, Tensor], Any]


class Does(nn.Module):
    """What a function makes of the module and its input."""

    def __init__(self, then: Then) -> None:
        super().__init__()
        self.layer, self.scale, self.then = nn.Linear(4, 4), nn.Parameter(torch.rand(4)), then
        self.register_buffer("last", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.then(self, x)


def says(module: Any, x: Tensor) -> Tensor:
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


def two_for_one_gradient(module: Any, x: Tensor) -> Tensor:
    """``scale`` and the bias have one gradient, which is one value of the graph."""
    y: Tensor = module.layer(x) + module.scale
    return y


def transposed_norm(module: Any, x: Tensor) -> Tensor:
    """A kernel of the CPU lays out its result as its input, where torch's trace has the batch first."""
    channels = module.layer(x.expand(2, 3, 4)).transpose(1, 2)
    normal = torch.nn.functional.batch_norm(channels, None, None, training=True)
    rows: Tensor = module.layer(normal.transpose(1, 2)) * module.scale
    return rows


def nested(module: Any, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(module.layer(x) * module.scale, torch.tensor([0, 1, 3]))
    values: Tensor = torch.nn.functional.gelu(parts).values()
    return values


def chosen(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    z: Tensor = torch.cond(y.sum() > 0, lambda z: z * 2, lambda z: z.sin(), (y,))
    return z * module.scale


def test_forward_says_what_it_prints(capfd: pytest.CaptureFixture[str]) -> None:
    model = tz.compile(fresh(partial(Does, says)), 3)
    capfd.readouterr()
    output = model(X)
    assert capfd.readouterr().out.splitlines() == ["rows: 3", "said"]
    output.sum().backward()
    assert not capfd.readouterr().out


@pytest.mark.parametrize(
    "then", [says, asserts, copies, inner_gradient, two_for_one_gradient, transposed_norm, nested, chosen]
)
def test_it_trains_as_in_eager_mode(then: Then) -> None:
    assert_same_as_eager(fresh(partial(Does, then)), X)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_an_assert_of_a_graph_raises_its_own_words_in_forward(mode: Callable[[], Any]) -> None:
    def fails(module: Any, x: Tensor) -> Tensor:
        torch._assert_async((x > 100).all(), "too small")
        y: Tensor = module.layer(x) * module.scale
        return y

    with pytest.raises(RuntimeError, match=r"^too small"), mode():
        tz.compile(fresh(partial(Does, fails)), 3)(X)


class Beside(nn.Module):
    """Computes with a tensor subclass beside plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), (other * 2).sin()


def pair() -> Tensor:
    made: Tensor = TwoTensor(X.clone(), X.cos())
    return made.requires_grad_()


@pytest.mark.parametrize("used", [(0, 1), (1,), (0,)], ids=str)
def test_tensor_subclasses_pass_beside_parameters(used: tuple[int, ...]) -> None:
    plain = fresh(Beside)
    results = []
    for network in (tz.compile(deepcopy(plain), 3), plain):
        other: Any = pair()
        outputs = network(X, other)
        for number in used:
            outputs[number].sum().backward(retain_graph=True)
        results.append((outputs, other.grad))
    (mine, grad), (right, expected) = results
    assert type(mine[1]) is TwoTensor
    torch.testing.assert_close((mine[0], mine[1].a, mine[1].b), (right[0], right[1].a, right[1].b))
    if expected is None:
        assert not grad.a.any()
    else:
        torch.testing.assert_close((grad.a, grad.b), (expected.a, expected.b))


# Refused


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
    y: Tensor = module.layer(x) @ torch.ones(3, 3)  # the user's line
    return y


def of_two_tensors(module: Any, x: Tensor) -> Tensor:
    y: Tensor = module.layer(x)
    return y


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


REFUSED: list[tuple[Then, Callable[[], Tensor], tuple[str, ...]]] = [  # and words of the sentence
    (writes, X.clone, ("writes to parameter 'scale'",)),
    (replaces, X.clone, ("writes to parameter 'scale'",)),
    (returns, X.clone, ("returns the parameter 'scale' itself",)),
    (lambda module, x: module.scale, X.clone, ("returns the parameter 'scale' itself",)),
    (differentiates, X.clone, ("create_graph=True", "torch.func.grad")),
    (mismatches, X.clone, ("cannot trace Does", "test_what_torch_hands_over.py:", "must have same reduction dim")),
    (of_two_tensors, pair, ("'layer.weight'", "tensor subclass", "plain tensor")),
    (of_two_tensors, jagged, ("cannot trace Does", "nested", "padded")),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_what_is_refused(number: int, mode: Callable[[], Any], capfd: pytest.CaptureFixture[str]) -> None:
    then, given, words = REFUSED[number]
    if mode is torch.no_grad and (then is differentiates or given is pair):
        return  # there is no gradient
    with refused(RuntimeError, *words), mode():
        tz.compile(fresh(partial(Does, then)), 3)(given())
    assert "Traceback" not in capfd.readouterr().err


def test_a_copy_of_a_model_computes_nothing() -> None:
    model = tz.compile(fresh(partial(Does, of_two_tensors)), 3)
    copied = deepcopy(model)
    with refused(RuntimeError, "copy of a sharded Does", "full_state_dict"):
        copied(X)
    with refused(RuntimeError, "copy of a sharded Does"):
        deepcopy(copied)(X)
    assert len(copied.state_dict()) == len(model.state_dict())


def test_views_of_inputs_say_without_gradients_what_torch_says() -> None:
    def views(module: Any, x: Tensor) -> Any:
        return x, x.view(-1), x.t()[1:], module.layer(x).view(-1), module.layer(x.t()[:4].t())

    plain = fresh(partial(Does, views))
    outputs = []
    for network in (tz.compile(deepcopy(plain), 3), plain):
        x = X.clone().requires_grad_()
        with torch.no_grad():
            outputs.append(network(x))
    for mine, right in zip(*outputs, strict=True):
        torch.testing.assert_close(mine, right)
        assert (mine.requires_grad, mine.grad_fn) == (right.requires_grad, right.grad_fn)

"""Modules whose gradient Thunder silently gets wrong are refused."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused
from tests.harness.models import full
from tests.harness.tiers import slow

import thunder

Function = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A module that applies a function to the output of a layer."""

    def __init__(self, then: Function) -> None:
        super().__init__()
        self.a, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.a.forward(x).exp())


class Scaled(Net):
    """A module that multiplies with a 0-dim parameter and with values computed from it."""

    def __init__(self, then: Function) -> None:
        super().__init__(then)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) * self.scale.exp() / self.scale.square()


def divided(x: Tensor) -> Tensor:
    x /= x.sum(-1, keepdim=True)
    return x


def stacked(x: Tensor) -> Tensor:
    return torch.hstack([x, x])


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-0.1, 0.1)
    return x


def through_a_view(x: Tensor) -> Tensor:
    x[:, :2].mul_(2)
    return x


def before_a_view_is_read(x: Tensor) -> Tensor:
    view = x[:, 1:]
    x.mul_(2)
    return view.tanh()


def twice_before_a_view_is_returned(x: Tensor) -> Tensor:
    view = x[:, 1:]
    x.mul_(2)
    x.mul_(2)
    return view


def assigned_before_a_view_is_read(x: Tensor) -> Tensor:
    view = x.view(-1)
    x[:, :2] = x[:, :2] * 2
    return view


def assigned_elsewhere(x: Tensor) -> Tensor:
    view = x[:, :2]
    view.mul_(2)
    x[:, 2:] = view
    return x


def copied_into_a_view(x: Tensor) -> Tensor:
    z = torch.zeros(2, 4)
    z[:, :2].copy_(x[:, :2])
    return z


def rotated(x: Tensor) -> Tensor:
    """Rotate as rotary embeddings do, with a factor that requires no gradient."""
    return torch.view_as_real(torch.view_as_complex(x.view(2, 2, 2)) * torch.polar(torch.ones(2), torch.arange(2.0)))


WRONG: dict[Function, str] = {
    rotated: "computes mul of complex numbers that have a gradient",
    divided: "writes in place",
    stacked: "gives torch.hstack a list of tensors",
    under_no_grad: "under no_grad, to a value that has a gradient",
    through_a_view: "and then reads another view of its memory",
    before_a_view_is_read: "and then reads another view of its memory",
    twice_before_a_view_is_returned: "and then reads another view of its memory",
    assigned_before_a_view_is_read: "and then reads another view of its memory",
    assigned_elsewhere: "and then reads another view of its memory",
    copied_into_a_view: "and then reads another view of its memory",
}


@pytest.mark.parametrize("then", [divided, *slow(*(then for then in WRONG if then is not divided))])
def test_a_wrong_gradient_is_refused(then: Function) -> None:
    with refused(RuntimeError, "forward of Net", WRONG[then]):
        tz.trace(Net(then), torch.ones(2, 4), frontend="thunder")


@pytest.mark.slow
def test_without_gradients_nothing_is_refused() -> None:
    with torch.no_grad():
        tz.trace(Net(lambda x: stacked(divided(x))), torch.ones(2, 4))


class WritesToCopy(nn.Linear):
    """A layer that writes to a copy of its parameter, which Thunder takes for a view."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.transpose(0, 1).contiguous()
        weight += x
        return weight


class WritesToInput(Net):
    """A module that applies the function to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a.forward(self.then(x))


@pytest.mark.slow
def test_writing_to_an_input_or_to_a_parameter_is_refused() -> None:
    doubled = WritesToInput(lambda x: x.mul_(2))
    with refused(RuntimeError, "forward of WritesToInput", "writes in place to an input that requires a gradient"):
        tz.trace(doubled, torch.ones(2, 4, requires_grad=True), frontend="thunder")
    tz.trace(doubled, torch.ones(2, 4), frontend="thunder")
    message = ("forward of WritesToCopy", "weight.transpose(0, 1).clone() (", "test_wrong_gradients.py")
    with refused(RuntimeError, *message):
        tz.trace(WritesToCopy(4, 4), torch.ones(4), frontend="thunder")


def assigned(x: Tensor) -> Tensor:
    x = x + 1
    x[:, :2] *= 2
    x[:, 0] = 1
    return x


def views_read_before(x: Tensor) -> Tensor:
    x = x * 2
    read = x[:, 1:].sigmoid()
    x.mul_(3)
    return x[:, 1:].tanh() * read


def written_view_read_alone(x: Tensor) -> Tensor:
    view = (x * 2)[:, :2]
    view.mul_(2)
    return view.tanh()


def reshaped(x: Tensor) -> Tensor:
    rows = (x * 2).reshape(-1, 2)
    rows += 1
    return rows.tanh()


ALLOWED: tuple[Function, ...] = (
    assigned,
    views_read_before,
    written_view_read_alone,
    reshaped,
    lambda x: torch.relu_(x + 1),
)
BROADCAST: tuple[Function, ...] = (  # broadcast scalars, whose gradient is a sum
    lambda x: x / x.square().sum(),
    lambda x: x.add(1) * x.mean(),
    lambda x: x - x[0, 0],
    lambda x: torch.where(x > 1, x, x.mean()),
)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("net", "thens"), [(Net, ALLOWED), *slow((Scaled, BROADCAST))])
def test_correct_gradients_are_not_refused(net: Callable[[Function], nn.Module], thens: tuple[Function, ...]) -> None:
    """No other view is read after a write, or a scalar is broadcast."""
    torch.manual_seed(0)
    plain = net(lambda x: torch.stack([then(x).square().sum() for then in thens]))
    model, x = thunder.jit(deepcopy(plain), transforms=[tz.ZeroTransform(stage=3)]), torch.randn(3, 4)
    for trained in (model, plain):
        trained(x).square().sum().backward()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), param.grad)

"""Modules whose gradient Thunder 0.2.6 gets wrong without a word are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import refused

import thunder


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.then = nn.Linear(4, 4), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.a(x).exp())


class Scaled(Net):
    """A parameter of no dimensions, alone and in what is computed from it."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__(then)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) * self.scale.exp() / self.scale.square()


def divided(x: Tensor) -> Tensor:
    x /= x.sum(-1, keepdim=True)
    return x


def stacked(x: Tensor) -> Tensor:
    return torch.hstack([x, x])


def relu(x: Tensor) -> Tensor:
    return torch.relu_(x + 1)


@pytest.mark.parametrize(
    ("then", "word"), [(divided, "writes in place"), (stacked, "gives torch.hstack a list of tensors")]
)
@pytest.mark.slow
def test_a_wrong_gradient_is_refused(then: Callable[[Tensor], Tensor], word: str) -> None:
    with refused(RuntimeError, "forward of Net", word):
        tz.trace(Net(then), torch.ones(2, 4))
    with torch.no_grad():
        tz.trace(Net(then), torch.ones(2, 4))


@pytest.mark.slow
def test_thunder_alone_gets_it_wrong() -> None:
    """When this fails, a newer Thunder may need no refusal."""
    torch.manual_seed(0)
    net, x = Net(divided), torch.randn(2, 4)
    weights = torch.randn(2, 4)
    (thunder.jit(net)(x) * weights).sum().backward()
    wrong = net.a.weight.grad
    net.zero_grad()
    y = net.a(x).exp()
    (y / y.sum(-1, keepdim=True) * weights).sum().backward()
    assert wrong is not None
    assert net.a.weight.grad is not None
    assert (wrong - net.a.weight.grad).abs().max() > 0.01


@pytest.mark.slow
def test_what_is_right_in_place_is_not_refused() -> None:
    tz.trace(Net(relu), torch.ones(2, 4))


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


LOST: dict[Callable[[Tensor], Tensor], str] = {
    under_no_grad: "under no_grad, to a value that has a gradient",
    through_a_view: "and then reads another view of its memory",
    before_a_view_is_read: "and then reads another view of its memory",
    twice_before_a_view_is_returned: "and then reads another view of its memory",
    assigned_before_a_view_is_read: "and then reads another view of its memory",
    assigned_elsewhere: "and then reads another view of its memory",
    copied_into_a_view: "and then reads another view of its memory",
}


@pytest.mark.parametrize("then", LOST)
@pytest.mark.slow
def test_a_gradient_that_would_be_lost_is_refused(then: Callable[[Tensor], Tensor]) -> None:
    with refused(RuntimeError, "forward of Net", LOST[then]):
        tz.trace(Net(then), torch.ones(2, 4))


class Turned(nn.Linear):
    """Writes to what eager computes as a copy, and Thunder takes for a view of the parameter."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.transpose(0, 1).contiguous()
        weight += x
        return weight


def doubled_input(x: Tensor) -> Tensor:
    x.mul_(2)
    return x


class Given(Net):
    """Hands its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.then(x))


@pytest.mark.slow
def test_writing_to_an_input_is_refused_if_that_has_a_gradient() -> None:
    with refused(RuntimeError, "forward of Given", "writes in place to an input that requires a gradient"):
        tz.trace(Given(doubled_input), torch.ones(2, 4, requires_grad=True))
    tz.trace(Given(doubled_input), torch.ones(2, 4))


@pytest.mark.slow
def test_writing_to_what_may_be_a_view_of_a_parameter_is_refused() -> None:
    with refused(RuntimeError, "forward of Turned", "weight.transpose(0, 1).clone() (", "test_wrong_gradients.py"):
        tz.trace(Turned(4, 4), torch.ones(4))


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


def equals_eager(net: nn.Module, x: Tensor) -> None:
    right = deepcopy(net)
    model = thunder.jit(net, transforms=[tz.ZeroTransform(stage=3)])
    for each in (model, right):
        each(x).square().sum().backward()
    for name, param in right.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("then", [assigned, views_read_before, written_view_read_alone, reshaped])
@pytest.mark.slow
def test_writing_in_place_is_right_where_no_other_view_is_read(then: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    equals_eager(Net(then), torch.randn(3, 4))


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda x: x / x.square().sum(),
    "times a mean": lambda x: x.add(1) * x.mean(),
    "an element": lambda x: x - x[0, 0],
    "where": lambda x: torch.where(x > 1, x, x.mean()),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.slow
def test_scalars_that_are_broadcast_get_the_sum_of_gradients(name: str) -> None:
    torch.manual_seed(0)
    equals_eager(Scaled(SCALARS[name]), torch.randn(3, 4))

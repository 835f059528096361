"""Parameters that the loss uses outside of forward: DDP's gradients in stage 0, a sentence from stage 1 on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thunder_zero as tz
from tests.harness.errors import error_of, fails, refused
from tests.harness.models import fresh, full, relative_error
from tests.harness.ranks import RanksPool, example_environment
from thunder_zero.sharded.sharded_model import MIXED

Loss = Callable[[Any, Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.inner(self.embed(tokens))) * self.scale
        logits = self.head(hidden)
        return hidden + logits.mean() if targets is None else F.cross_entropy(logits, targets)


def squares(model: Any) -> Any:
    return sum(param.square().sum() for param in model.parameters())


def by_angles(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(hidden), F.normalize(weight))


def gradient_penalty(plain: Any, tokens: Tensor) -> Tensor:
    x = torch.ones(len(tokens), 4, requires_grad=True) * tokens[:, None]
    (grad,) = torch.autograd.grad(plain.inner(x).tanh().sum(), x, create_graph=True)
    return grad.square().sum()


LOSSES: dict[str, Loss] = {
    "inside": lambda model, plain, t, y: model(t, y),
    "embedding": lambda model, plain, t, y: F.cross_entropy(F.linear(model(t), plain.embed.weight), y),
    "submodule": lambda model, plain, t, y: model(t, y) + plain.embed(t).square().mean() * y.sum(),
    "normalized head": lambda model, plain, t, y: F.cross_entropy(by_angles(model(t), plain.head.weight), y),
    "penalty times loss": lambda model, plain, t, y: model(t, y) * squares(model),
    "penalty": lambda model, plain, t, y: model(t, y) + 0.1 * squares(model),
    "scale": lambda model, plain, t, y: model(t, y) * plain.scale,
    "gradient penalty": lambda model, plain, t, y: model(t, y) + gradient_penalty(plain, t),
}


def one_backward(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    loss(model, plain, t, y).backward()


def adding_up(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    for _ in range(2):
        one_backward(model, plain, loss, t, y)


def deferring(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    with model.no_sync():
        one_backward(model, plain, loss, t, y)
    one_backward(model, plain, loss, t, y)


def into_zeros(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    for param in plain.parameters():
        param.grad = torch.zeros_like(param)
    one_backward(model, plain, loss, t, y)


def without_grad(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    """Set ``.grad`` from ``torch.autograd.grad``, which gives mean gradients, and this rank's under DDP."""
    params = list(plain.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss(model, plain, t, y), params), strict=True):
        param.grad = grad
        if isinstance(model, DistributedDataParallel):
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()


def hooked(model: Any, plain: Any, loss: Loss, t: Tensor, y: Tensor) -> None:
    """Check that hooks after accumulation see the final gradients."""
    seen: dict[Tensor, Tensor] = {}

    def keep(param: Tensor) -> None:
        assert param.grad is not None
        seen[param] = param.grad.clone()

    handles = [
        handle
        for param in plain.parameters()
        for handle in (param.register_hook(lambda grad: 2 * grad), param.register_post_accumulate_grad_hook(keep))
    ]
    one_backward(model, plain, loss, t, y)
    if not isinstance(model, DistributedDataParallel):
        assert all(torch.equal(param.grad, seen[param]) for param in plain.parameters())
    for handle in handles:
        handle.remove()


LOOPS = (one_backward, adding_up, deferring, into_zeros, without_grad, hooked)


def has_gradients_of_ddp(rank: int, world_size: int) -> None:
    plain, torchs = fresh(Net), fresh(Net)
    model = tz.compile(plain, stage=0)
    ddp = DistributedDataParallel(torchs)
    torch.manual_seed(rank)
    t, y = torch.randint(6, (7,)), torch.randint(1, 5, (7,))
    loops = [(loop, name) for name in LOSSES for loop in (LOOPS if name == "submodule" else LOOPS[:1])]
    for loop, name in loops:
        for side, inner in ((model, plain), (ddp, torchs)):
            side.zero_grad()
            loop(side, inner, LOSSES[name], t, y)
        for (path, param), other in zip(plain.named_parameters(), torchs.parameters(), strict=True):
            assert param.grad is not None, (name, path)
            assert other.grad is not None, (name, path)
            assert (type(param), type(param.grad)) == (nn.Parameter, Tensor)
            error = relative_error(param.grad, other.grad)
            assert error < 1e-5, (loop.__name__, name, path, error)


def test_stage_0_averages_gradients_from_outside_of_forward(ranks_pool: RanksPool) -> None:
    ranks_pool.run(2, has_gradients_of_ddp)


MIXES = ("embedding", "submodule", "normalized head", "gradient penalty")
DTENSORS = ("penalty times loss", "penalty", "scale")


def is_refused(rank: int, world_size: int, replicated: tuple[str, ...]) -> None:
    """Check stage 3, and that parameters which stay full get mean gradients where torch does compute."""
    plain = fresh(Net)
    model = tz.compile(plain, stage=3, replicated=replicated)
    torch.manual_seed(rank)
    t, y = torch.randint(6, (7,)), torch.randint(1, 5, (7,))
    for name in (*MIXES, *DTENSORS):
        words = (MIXED,) if name in MIXES else ("loss combines an output of Net", "number.full_tensor()", "in forward")
        fails(lambda: LOSSES[name](model, plain, t, y).backward(), "RuntimeError", *words)  # noqa: B023
        assert all(param.grad is None for param in plain.parameters()), name
    factor = y.sum().float()
    (plain.scale * factor).backward()
    dist.all_reduce(factor)
    assert plain.scale.grad is not None
    assert full(plain.scale.grad).equal(factor / world_size)
    (model(t, y) + 0.1 * squares(model).full_tensor()).backward()


@pytest.mark.parametrize("replicated", [("embed.weight", "head.weight"), pytest.param((), marks=pytest.mark.slow)])
def test_stage_3_refuses_to_mix(ranks_pool: RanksPool, replicated: tuple[str, ...]) -> None:
    ranks_pool.run(2, is_refused, replicated)


def one_rank_alone(rank: int, world_size: int) -> str:
    plain = fresh(Net)
    model = tz.compile(plain, stage=0)
    t, y = torch.arange(6), torch.ones(6, dtype=torch.long)

    def train() -> None:
        for _ in range(2):
            (model(t, y) + (plain.embed(t).sum() if rank == 0 else 0)).backward()

    return error_of(train)


def test_an_average_on_one_rank_raises_on_all(ranks_pool: RanksPool) -> None:
    first, second = ranks_pool.run(2, one_rank_alone)
    assert first == second
    assert "the ranks do different things: rank 0 is in the mean of the gradient of 'embed.weight'" in first


def loses_gradients(rank: int, world_size: int) -> None:
    """Check that a replaced parameter gets no gradient, and that a mean over ranks, which has no graph, is refused."""
    plain = fresh(Net)
    kept = plain.embed.weight
    model = tz.compile(plain, stage=0)
    t, y = torch.arange(6), torch.ones(6, dtype=torch.long)
    hidden = model(t)
    with refused(RuntimeError, "'embed.weight', which the transform replaced", "its gradient would be lost"):
        F.cross_entropy(F.linear(hidden, kept), y).backward()
    with refused(RuntimeError, "'embed.weight'", "the mean over ranks has no graph"):
        plain.embed(t).square().sum().backward(create_graph=True)


def test_lost_gradients_are_refused(ranks_pool: RanksPool) -> None:
    ranks_pool.run(1, loses_gradients)


SCRIPT = """
import torch, torch.distributed as dist
import thunder_zero as tz

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = tz.compile(torch.nn.Sequential(torch.nn.Embedding(6, 4)), stage=3)
model.get_submodule("0")(torch.arange(3))
"""


@pytest.mark.slow
def test_an_uncaught_error_of_torch_ends_with_advice() -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=example_environment())
    assert result.returncode == 1
    *_, torchs, ours = result.stderr.strip().splitlines()
    assert MIXED in torchs
    assert ours.startswith("thunder_zero: parameter '0.weight' of model 0 (Sequential) was used outside of forward")

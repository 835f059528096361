"""Promises that FSDP2's own tests check hold here, too, each against eager; docs/from-fsdp2.md lists them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.as_one_process import Loop, Side, Steps, trains_as_one_process
from tests.harness.checkpoints import take_step
from tests.harness.loops import ROWS, WIDTH, batch, deferred_steps, sgd, two_steps
from tests.harness.models import fresh, sharded
from tests.harness.ranks import RanksPool

pytestmark = pytest.mark.slow

RESHARDING = tz.Policy(stage=3, reshard_after_forward=True)  # backward gathers all that it reads
WORLD = 2


# Training loops


def run_each_output(side: Side) -> Steps:
    """Run backward for each of two outputs, for one of them twice."""
    left, right = side.models[0](side.rows(batch()))
    loss = right.square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
    left.square().mean().backward()
    yield side.gather(left + right)


def run_two_forwards(side: Side) -> Steps:
    """Run one backward for two forwards, as preference training (DPO) does."""
    parts, total = side.parts(batch(), [ROWS // WORLD] * WORLD), torch.zeros(())
    for part in parts:
        chosen, rejected = side.models[0](part), side.models[0](2 * part)
        loss = (chosen.square().mean() - rejected.square().mean()).square() / len(parts)
        loss.backward()
        total += loss.detach()
    yield side.mean(total)


def run_without_inputs(side: Side) -> Steps:
    y = side.models[0]()
    y.square().mean().backward()
    yield y.detach()


def skip_head_twice(side: Side) -> Steps:
    """Skip the head in two forwards; check that its gradient stays None."""
    (model,) = side.models
    first, second = (model(side.rows(batch(step)), skip_head=True) for step in range(2))
    (first.square().mean() + second.square().mean()).backward()
    assert model.get_parameter("head.weight").grad is None
    yield side.gather(first + second)


# Modules


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.inner(x) + self.inner(torch.tanh(self.inner(x))))
        return y


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.shared(x))
        return self.left(x), self.right(x)


class Blocks(nn.Module):
    def __init__(self, *, checked: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in "ab"])
        self.checked = checked

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checked else block(x))
        return x


def wrap_blocks() -> nn.Module:
    """Wrap blocks by torch's ``apply_activation_checkpointing``."""
    module = Blocks()
    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, nn.Sequential))
    return module


def make_biases_alone() -> nn.Module:
    module = Blocks(checked=True)
    for name, param in module.named_parameters():
        param.requires_grad_("bias" in name)
    return module


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


class Frozen(nn.Module):
    """A module that calls a trained layer with and without gradients, and reads frozen parameters of odd dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.eight_bits = nn.Parameter(torch.ones(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.integers = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.frozen(torch.tanh(self.trained(x)))
            with torch.no_grad():
                more = torch.tanh(self.trained(x))
            x = x + more
        return x * self.eight_bits.to(torch.float32) + self.integers


class WithHead(nn.Module):
    """A module that calls another method of a submodule than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Features(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        x = self.body.features(x)
        return x if skip_head else self.head(x)


class Features(nn.Linear):
    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self(x))


Pair = namedtuple("Pair", "x y")


@dataclass
class Couple:
    x: list[Tensor]
    y: dict[str, Pair]


class Packs(nn.Module):
    """A module that passes activations in a list, a dict, a named tuple and a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = OnPacked(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        packed: Any = self.packed(Couple([x], {"pair": Pair(x, 2 * x)}))
        return packed.x[0] + packed.y["pair"].y


class OnPacked(nn.Linear):
    def forward(self, packed: Any) -> Any:
        pair = packed.y["pair"]
        return Couple([super().forward(packed.x[0])], {"pair": Pair(pair.y, torch.tanh(pair.x))})


def make_channels_last() -> nn.Module:
    conv = nn.Conv2d(WIDTH, 6, 3, padding=1)
    conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
    return nn.Sequential(nn.Unflatten(1, (WIDTH, 1, 1)), conv, nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Loop, tz.Policy]] = {
    "a layer called three times, zeros instead of None, no_sync": (UsedTwice, deferred_steps, tz.ZERO1),
    "several backwards of one forward": (TwoOutputs, run_each_output, RESHARDING),
    "biases alone, one loss of two checkpointed forwards": (make_biases_alone, run_two_forwards, RESHARDING),
    "checkpoint_wrapper": (wrap_blocks, two_steps, tz.ZERO1),
    "frozen numbers, no_grad inside forward": (Frozen, two_steps, RESHARDING),
    "forward without inputs": (OneWeight, run_without_inputs, tz.ZERO1),
    "another method of a submodule, the head skipped": (WithHead, skip_head_twice, RESHARDING),
    "activations in containers": (Packs, two_steps, RESHARDING),
    "channels_last": (make_channels_last, two_steps, tz.ZERO1),
}


def train(rank: int, world_size: int, name: str) -> None:
    make, loop, policy = CASES[name]
    trains_as_one_process([(sharded(fresh(make), policy), fresh(make))], loop)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_eager(ranks_pool: RanksPool, name: str) -> None:
    ranks_pool.run(WORLD, train, name)


# Several models in one step


class Around(nn.Module):
    """A model with a layer around another model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.own, self.inner = fresh(nn.Linear, WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(torch.tanh(self.own(x)))
        return y


def wrap_in_ddp(model: Around) -> nn.Module:
    """Wrap the outer layer by DDP, which leaves out the inner model's placeholders."""
    inner = [name for name, _ in model.named_parameters() if name.startswith("inner.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, inner)
    return DistributedDataParallel(model, broadcast_buffers=False)


def train_body_and_head(side: Side) -> Steps:
    """Run backward of a head for each chunk, then of the body; then train the head inside of a model in DDP."""
    body, head = side.models
    hidden = body(side.rows(batch()))
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(3)]
    for chunk in chunks:
        head(chunk).square().mean().backward()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None]))
    yield side.gather(hidden)
    around = Around(head)
    whole = wrap_in_ddp(around) if side.is_sharded else around
    whole(side.rows(batch(1))).square().mean().backward()
    assert around.own.weight.grad is not None
    yield around.own.weight.grad


def train_two_models(rank: int, world_size: int) -> None:
    body, head = fresh(Blocks), fresh(UsedTwice)
    trains_as_one_process([(sharded(body, RESHARDING), body), (sharded(head, tz.ZERO1), head)], train_body_and_head)


def test_two_models_in_one_step(ranks_pool: RanksPool) -> None:
    ranks_pool.run(WORLD, train_two_models)


# State dicts


def load_in_pieces(rank: int, world_size: int) -> None:
    """Check that a state dict's values alias the shards after a step, and load one by one."""
    for policy in (tz.ZERO1, RESHARDING):
        model = sharded(fresh(UsedTwice), policy)
        before: dict[str, Any] = get_model_state_dict(model)
        local_values = {path: value.to_local() for path, value in before.items()}
        take_step(model, sgd(model))
        after: dict[str, Any] = get_model_state_dict(model)
        for path, value in after.items():
            assert local_values[path].data_ptr() == model.get_parameter(path).to_local().data_ptr(), path
            assert torch.equal(local_values[path], value.to_local()), path
            piece: dict[str, Any] = {path: torch.full_like(value, 7.0)}
            set_model_state_dict(model, piece, options=StateDictOptions(strict=False))
        assert all(bool((value == 7).all()) for value in tz.full_state_dict(model).values())


def test_a_state_dict_follows_training_and_loads_in_pieces(ranks_pool: RanksPool) -> None:
    ranks_pool.run(WORLD, load_in_pieces)


# Mixed precision


class Inside(nn.Module):
    """A module that computes in float16, and returns its second input as received."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x.half()), y


HALF = torch.float16
BORDERS = {
    "cast": (tz.MixedPrecision(HALF), [HALF, HALF]),
    "inputs": (tz.MixedPrecision(HALF, cast_forward_inputs=False), [HALF, torch.float32]),
    "outputs": (tz.MixedPrecision(HALF, output_dtype=torch.float32), [torch.float32, torch.float32]),
}


class Outside(nn.Module):
    """A module that gives submodules a float32 tensor that no module computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inside = nn.ModuleDict({name: Inside() for name in BORDERS})

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        return [output for inside in self.inside.values() for output in inside(x, torch.ones(ROWS, WIDTH))]


def cast_at_borders(rank: int, world_size: int) -> None:
    mixed = tz.MixedPrecision(overrides={f"inside.{name}": half for name, (half, _) in BORDERS.items()})
    outputs = sharded(fresh(Outside), tz.Policy(mixed_precision=mixed))(batch())
    sum(output.float().sum() for output in outputs).backward()
    assert [output.dtype for output in outputs] == [dtype for _, dtypes in BORDERS.values() for dtype in dtypes]


def test_casts_at_the_border_of_a_submodule(ranks_pool: RanksPool) -> None:
    ranks_pool.run(WORLD, cast_at_borders)


def compare_gradients(rank: int, world_size: int) -> None:
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    grads = []
    for checked in (False, True):
        policy = tz.Policy(3, reshard_after_forward=True, mixed_precision=half)
        model = sharded(fresh(partial(Blocks, checked=checked)), policy)
        model(batch()).square().mean().backward()
        grads.append([param.grad for param in model.parameters()])
    assert_close(*grads, rtol=0, atol=0)


def test_checkpointing_in_mixed_precision_changes_no_bit(ranks_pool: RanksPool) -> None:
    ranks_pool.run(WORLD, compare_gradients)

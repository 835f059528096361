"""Promises of FSDP2's own tests that no other test here shows, each against eager; docs/fsdp2.md lists all promises.

The reference is an eager copy on each rank, whose gradients are averaged over the ranks before the optimizer steps.
"""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import thunder_zero as tz
from tests.harness.models import error, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

POLICIES = (tz.ZERO1, tz.Policy(stage=3, gather_last_units_once=False))
WIDTH, ROWS, STEPS = 4, 3, 3
Loop = Callable[[Any, Callable[[], None], int], list[Tensor]]  # of a model, what averages its gradients, and the rank


def rows(rank: int, step: int = 0) -> Tensor:
    """A rank's batch of one step: (ROWS, WIDTH)."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], 0.1, momentum=0.9)


# Training loops


def train(model: Any, average: Callable[[], None], rank: int) -> list[Tensor]:
    """Some steps; every other one begins with zeros instead of None as gradients."""
    optimizer, outputs = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        outputs.append(model(rows(rank, step)))
        outputs[-1].square().mean().backward()
        average()
        optimizer.step()
    return outputs


def train_deferred(model: Any, average: Callable[[], None], rank: int) -> list[Tensor]:
    """As ``train``, with three micro-batches a step, of which the first two are deferred."""
    optimizer, outputs = optimizer_of(model), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 1)
        for part in range(3):
            deferred = isinstance(model, tz.ZeroModule) and part < 2
            with model.no_sync() if deferred else contextlib.nullcontext():
                outputs.append(model(rows(rank, 10 * step + part)))
                outputs[-1].square().mean().backward()
        average()
        optimizer.step()
    return outputs


def step_after(backward: Callable[[Any, int], list[Tensor]]) -> Loop:
    """A loop of one step."""

    def loop(model: Any, average: Callable[[], None], rank: int) -> list[Tensor]:
        optimizer = optimizer_of(model)
        outputs = backward(model, rank)
        average()
        optimizer.step()
        return outputs

    return loop


def one_loss_twice(model: Any, rank: int) -> list[Tensor]:
    loss = model(rows(rank)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def a_loss_for_each_output(model: Any, rank: int) -> list[Tensor]:
    left, right = model(rows(rank))
    right.square().mean().backward(retain_graph=True)
    left.square().mean().backward()
    return [left, right]


def one_loss_of_two_forwards(model: Any, rank: int) -> list[Tensor]:
    """As preference training (DPO) does."""
    chosen, rejected = model(rows(rank, 0)), model(rows(rank, 1))
    (chosen.square().mean() - rejected.square().mean()).square().backward()
    return [chosen, rejected]


def without_inputs(model: Any, rank: int) -> list[Tensor]:
    y = model()
    y.square().mean().backward()
    return [y]


def without_the_head(model: Any, rank: int) -> list[Tensor]:
    """Two forwards that skip the head: its gradient stays None."""
    first, second = (model(rows(rank, step), skip_head=True) for step in range(2))
    (first.square().mean() + second.square().mean()).backward()
    return [first, second]


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


def wrapped_blocks() -> nn.Module:
    """Blocks inside the wrapper that torch's ``apply_activation_checkpointing`` puts around them."""
    module = Blocks()
    apply_activation_checkpointing(module, check_fn=lambda part: isinstance(part, nn.Sequential))
    return module


def biases_alone() -> nn.Module:
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


class FrozenNumbers(nn.Module):
    """Frozen parameters of dtypes that have no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.eight_bits = nn.Parameter(torch.ones(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.integers = nn.Parameter(torch.arange(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.eight_bits.to(torch.float32) + self.integers
        return y


class WithoutGradInside(nn.Module):
    """Calls the same layer with gradients and without, around a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.frozen(torch.tanh(self.trained(x)))
            with torch.no_grad():
                more = torch.tanh(self.trained(x))
            x = x + more
        return x


class WithHead(nn.Module):
    """Also calls a method of a submodule that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Features(), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, skip_head: bool = False) -> Tensor:
        x = self.body.features(x)
        return x if skip_head else self.head(x)


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


Pair = namedtuple("Pair", "x y")


@dataclass
class Couple:
    x: Tensor
    y: Tensor


def parts(pair: Any) -> tuple[Tensor, Tensor]:
    if isinstance(pair, dict):
        return pair["x"], pair["y"]
    return (pair.x, pair.y) if isinstance(pair, Couple) else (pair[0], pair[1])


class Packs(nn.Module):
    """Passes its activations from layer to layer in a container."""

    def __init__(self, kind: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList([OnPair(kind) for _ in "ab"])

    def forward(self, x: Tensor) -> Tensor:
        pair = self.kind(x, 2 * x)
        for layer in self.layers:
            pair = layer(pair)
        left, right = parts(pair)
        return left + right


class OnPair(nn.Module):
    def __init__(self, kind: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: Any) -> Any:
        left, right = parts(pair)
        return self.kind(self.layer(left), torch.tanh(self.layer(right)))


def as_dict(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"x": x, "y": y}


def as_list(x: Tensor, y: Tensor) -> list[Tensor]:
    return [x, y]


def channels_last() -> nn.Module:
    conv = nn.Conv2d(4, 6, 3, padding=1)
    conv.weight = nn.Parameter(conv.weight.detach().to(memory_format=torch.channels_last))
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), conv, nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "a layer called three times": (UsedTwice, train),
    "zeros instead of None, and no_sync": (UsedTwice, train_deferred),
    "one loss backward twice": (UsedTwice, step_after(one_loss_twice)),
    "a backward for each output": (TwoOutputs, step_after(a_loss_for_each_output)),
    "one loss of two checkpointed forwards": (partial(Blocks, checked=True), step_after(one_loss_of_two_forwards)),
    "checkpoint_wrapper": (wrapped_blocks, train),
    "biases alone, checkpointed": (biases_alone, train),
    "no_grad inside forward": (WithoutGradInside, train),
    "frozen numbers": (FrozenNumbers, train),
    "forward without inputs": (OneWeight, step_after(without_inputs)),
    "another method of a submodule": (WithHead, train),
    "the head skipped": (WithHead, step_after(without_the_head)),
    "activations in a list": (partial(Packs, as_list), train),
    "activations in a dict": (partial(Packs, as_dict), train),
    "activations in a named tuple": (partial(Packs, Pair), train),
    "activations in a dataclass": (partial(Packs, Couple), train),
    "channels_last": (channels_last, train),
}


def average_of(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def differences(rank: int, world_size: int, name: str) -> dict[str, float]:
    """Of outputs and weights from eager's, by stage and name; infinite where one has a gradient and one has not."""
    make, loop = CASES[name]
    eager = fresh(make)
    right = loop(eager, partial(average_of, eager), rank)
    found = {}
    for policy in POLICIES:
        model = sharded(fresh(make), policy)
        outputs = loop(model, lambda: None, rank)
        full = tz.full_state_dict(model)
        for at, (output, expected) in enumerate(zip(outputs, right, strict=True)):
            found[f"stage {policy.stage}, output {at}"] = error(output.detach(), expected.detach())
        for path, weight in eager.state_dict().items():
            found[f"stage {policy.stage}, {path}"] = error(full[path], weight)
        for path, param in eager.named_parameters():
            if (param.grad is None) != (model.get_parameter(path).grad is None):
                found[f"stage {policy.stage}, gradient of {path}"] = inf
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_eager(ranks_pool: RanksPool, name: str) -> None:
    for found in ranks_pool.run(2, differences, name, timeout=110):
        assert len(found) >= 2 * len(POLICIES)
        assert {what: difference for what, difference in found.items() if difference > 1e-5} == {}


# Several models in one step


def in_chunks(body: Any, head: Any, x: Tensor) -> None:
    """The loss of a head, chunk by chunk with a backward for each; then one backward of the body."""
    hidden = body(x)
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(ROWS)]
    for chunk in chunks:
        head(chunk).square().mean().backward()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None]))


class Around(nn.Module):
    """A layer of its own around another model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.own, self.inner = fresh(nn.Linear, WIDTH, WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(torch.tanh(self.own(x)))
        return y


def in_ddp(model: Around) -> nn.Module:
    """DDP, which leaves the inner model alone; its names are those of the placeholders."""
    inner = [name for name, _ in model.named_parameters() if name.startswith("inner.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, inner)
    return DistributedDataParallel(model, broadcast_buffers=False)


def two_models(rank: int, world_size: int) -> dict[str, float]:
    """Relative errors of the weights after one step."""
    found: dict[str, float] = {}
    for policy in POLICIES:
        eager, models = (
            (fresh(Blocks), fresh(UsedTwice)),
            (sharded(fresh(Blocks), policy), sharded(fresh(UsedTwice), policy)),
        )
        in_chunks(*eager, rows(rank))
        in_chunks(*models, rows(rank))
        for right, model in zip(eager, models, strict=True):
            average_of(right)
            found |= after_a_step(f"chunks, stage {policy.stage}", right, model)
        right, model = Around(fresh(UsedTwice)), Around(sharded(fresh(UsedTwice), policy))
        right(rows(rank)).square().mean().backward()
        replicated = in_ddp(model)
        replicated(rows(rank)).square().mean().backward()
        average_of(right)
        found |= {f"DDP, stage {policy.stage}, own": error(grad_of(model.own), grad_of(right.own))}
        found |= after_a_step(f"DDP, stage {policy.stage}, inner", right.inner, model.inner)
    return found


def grad_of(layer: nn.Linear) -> Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


def after_a_step(what: str, eager: nn.Module, model: Any) -> dict[str, float]:
    for one in (eager, model):
        optimizer_of(one).step()
    full = tz.full_state_dict(model)
    return {f"{what}, {path}": error(full[path], param.detach()) for path, param in eager.named_parameters()}


@pytest.mark.slow
def test_two_models_in_one_step(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, two_models, timeout=110):
        assert len(found) == len(POLICIES) * (8 + 4 + 1 + 4)
        assert {what: difference for what, difference in found.items() if difference > 1e-5} == {}


# State dicts


def kept_and_loaded_in_pieces(rank: int, world_size: int) -> list[tuple[bool, bool, bool]]:
    """Whether a state dict's values are the shards' own memory, still are after a step, and load one by one."""
    results = []
    for policy in POLICIES:
        model = sharded(fresh(UsedTwice), policy)
        kept = {path: value.to_local() for path, value in get_model_state_dict(model).items()}
        train(model, lambda: None, rank)
        now = {path: value.to_local() for path, value in get_model_state_dict(model).items()}
        shared = all(value.data_ptr() == model.get_parameter(path).data_ptr() for path, value in kept.items())
        follows = all(torch.equal(value, now[path]) for path, value in kept.items())
        for path, value in get_model_state_dict(model).items():
            piece = {path: torch.full_like(value, 7.0)}
            set_model_state_dict(model, piece, options=StateDictOptions(strict=False))
        loaded = all(bool((value == 7).all()) for value in tz.full_state_dict(model).values())
        results.append((shared, follows, loaded))
    return results


@pytest.mark.slow
def test_a_state_dict_that_is_kept_follows_training_and_pieces_load_one_by_one(ranks_pool: RanksPool) -> None:
    for results in ranks_pool.run(2, kept_and_loaded_in_pieces, timeout=110):
        assert results == [(True, True, True)] * len(POLICIES)


# Mixed precision


class Inside(nn.Module):
    """Computes in float16, and returns its second input as it gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x.half()), y


class Outside(nn.Module):
    """Gives a submodule a float32 tensor that no module computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside = nn.Linear(WIDTH, WIDTH), Inside()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.inside(self.first(x), torch.ones(ROWS, WIDTH))
        return out


BORDERS = {
    (torch.float16, torch.float16): tz.MixedPrecision(torch.float16),
    (torch.float16, torch.float32): tz.MixedPrecision(torch.float16, cast_forward_inputs=False),
    (torch.float32, torch.float32): tz.MixedPrecision(torch.float16, output_dtype=torch.float32),
}


def border_dtypes(rank: int, world_size: int) -> list[tuple[torch.dtype, ...]]:
    found = []
    for inside in BORDERS.values():
        mixed = tz.MixedPrecision(overrides={"inside": inside})
        model = sharded(fresh(Outside), tz.Policy(mixed_precision=mixed))
        outputs = model(rows(rank))
        outputs[0].sum().backward()
        found.append(tuple(output.dtype for output in outputs))
    return found


@pytest.mark.slow
def test_casts_at_the_border_of_a_submodule(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, border_dtypes, timeout=110) == [list(BORDERS)] * 2


def bits_of_gradients(rank: int, world_size: int) -> list[bool]:
    """Whether checkpointing leaves every gradient as it was, by policy."""
    half = tz.MixedPrecision(torch.bfloat16, output_dtype=torch.float32)
    results = []
    for policy in (tz.ZERO1, POLICIES[-1]):
        grads = []
        for checked in (False, True):
            model = sharded(fresh(partial(Blocks, checked=checked)), replace(policy, mixed_precision=half))
            model(rows(rank)).square().mean().backward()
            grads.append([param.grad for param in model.parameters()])
        results.append(all(map(torch.equal, *grads)))
    return results


@pytest.mark.slow
def test_checkpointing_in_mixed_precision_changes_no_bit(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, bits_of_gradients, timeout=110) == [[True, True]] * 2

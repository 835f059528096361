"""With ``tz.whole``, an ordinary optimizer on whole parameters takes the steps of one process.

Most tests set gradients by hand, so that no forward is compiled; the steps are then equal bit for bit.
Refusals: ``tests/ranks/test_whole_refusals.py``; checkpoints: ``tests/ranks/test_whole_checkpoints.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.as_one_process import gather_objects
from tests.harness.errors import fails
from tests.harness.models import Mlp, Small, bytes_of, count_sends, fresh, relative_error, sharded, storages
from tests.harness.ranks import LONG, RanksPool
from tests.harness.tiers import deep, slow
from tests.harness.whole_steps import CoupledIfAsked, CustomOptimizer, make_gradients, set_gradients
from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.optim import stepper
from thunder_zero.plan import layout
from thunder_zero.plan.mesh import SHARD

import thunder


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.ndim == 2]


def step_both(model: Any, plain: nn.Module, optimizers: Iterable[Any], grads: Mapping[str, Tensor]) -> None:
    """Step the sharded model and the plain one with the same gradients."""
    set_gradients(model, grads)
    for name, param in plain.named_parameters():
        param.grad = grads[name].clone() if name in grads and param.requires_grad else None
    for optimizer in optimizers:
        optimizer.step()


def assert_equal(model: Any, plain: nn.Module) -> None:
    full = tz.full_state_dict(model)
    differ = [name for name, param in plain.named_parameters() if not torch.equal(full[name], param.detach())]
    assert differ == [], differ


def assert_steps(
    model: Any,
    plain: nn.Module,
    kind: Any,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    *,
    steps: int = 3,
    missing: Mapping[int, Iterable[str]] | None = None,
    before: Callable[[int, Any, nn.Module], object] = lambda step, optimizer, module: None,
    **options: Any,
) -> tuple[Any, optim.Optimizer]:
    """Check that ``tz.whole`` steps the model, bit for bit, as the optimizer steps the plain module; return both.

    Args:
        groups: returns the parameters or groups of a module that its optimizer gets.
        missing: names without a gradient, by step, beyond those that ``make_gradients`` leaves out.
        before: called before each step, with each optimizer and its module.
    """
    both = tz.whole(kind, groups(model), **options), kind(groups(plain), **options)
    for step in range(steps):
        for optimizer, module in zip(both, (model, plain), strict=True):
            before(step, optimizer, module)
        without = (missing or {}).get(step, ())
        step_both(model, plain, both, {n: grad for n, grad in make_gradients(plain, step).items() if n not in without})
    assert_equal(model, plain)
    return both


# A training loop


def tokens(step: int) -> Tensor:
    return torch.randint(0, 9, (12, 3), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizers: list[optim.Optimizer], rank: int = 0, world_size: int = 1) -> None:
    """Take eight steps of two micro-batches, with one scaler, clipping and schedulers."""
    is_sharded = isinstance(model, tz.ZeroModule)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedulers = [optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers]
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            x = tokens(2 * step + micro).tensor_split(world_size)[rank]
            with model.no_sync() if micro == 0 and is_sharded else nullcontext():
                scaler.scale(model(x).square().mean()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        if is_sharded:
            tz.clip_grad_norm_(model, 0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()


def make_muon_and_adamw(model: nn.Module, build: Callable[..., Any]) -> list[Any]:
    others = [param for param in model.parameters() if param.ndim != 2]
    return [build(optim.Muon, matrices_of(model), lr=0.02), optim.AdamW(others, lr=0.01)]


def make_adafactor(model: nn.Module, build: Callable[..., Any]) -> list[Any]:
    return [build(optim.Adafactor, model.parameters(), lr=0.01)]


def train_as_one_process(rank: int, world_size: int, stage: int, owned: tuple[str, ...]) -> None:
    start = fresh(Small).double()
    model = sharded(start, tz.Policy(stage=stage, bucket_bytes=400, owned=owned))
    for make_optimizers in (make_muon_and_adamw, make_adafactor):
        plain = fresh(Small).double()
        train(plain, make_optimizers(plain, lambda kind, *args, **options: kind(*args, **options)))
        model.load_original_state_dict(start.state_dict())
        train(model, make_optimizers(model, tz.whole), rank, world_size)
        full = tz.full_state_dict(model)
        for name, expected in plain.state_dict().items():
            error = relative_error(full[name], expected)
            assert error < 1e-6, (make_optimizers, name, error)
        assert relative_error(full["layers.0.weight"], start.layers[0].weight) > 0.05, make_optimizers


OWNED = ("layers.*.weight",)


@pytest.mark.parametrize(("stage", "owned"), [(2, OWNED), *slow((3, ()), (1, ()), (3, OWNED)), *deep((0, ()), (2, ()))])
def test_it_trains_as_one_process(ranks_pool: RanksPool, stage: int, owned: tuple[str, ...]) -> None:
    """The loop accumulates, clips and shares a scaler; there are schedulers, tied, frozen and unused parameters."""
    ranks_pool.run(3, train_as_one_process, stage, owned, timeout=LONG)


# Steps by hand: bytes and states


def numel_of_states(optimizer: Any) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in values if isinstance(value, Tensor) and value.numel() > 1)


def count_bytes_and_states(rank: int, world_size: int) -> None:
    for stage, directions in enumerate(([1, 1], [2, 3], [3, 3], [3, 3])):  # in the first step, and in the second
        plain = fresh(Mlp)
        model = sharded(plain, tz.Policy(stage=stage, bucket_bytes=200))
        optimizer, plain_optimizer = tz.whole(optim.Adafactor, model.parameters()), optim.Adafactor(plain.parameters())
        sent = []
        for _ in directions:
            with count_sends() as messages:
                step_both(model, plain, (optimizer, plain_optimizer), make_gradients(plain, 0))
            sent.append(sum(messages))
        owners = [(member.param.shape, member.owner) for member in optimizer.members]
        assert gather_objects(owners) == [owners] * world_size, (stage, owners)
        owned_numel = sum(layout.owned_numel(shape, world_size, owner) for shape, owner in owners)
        numel = sum(prod(shape) for shape, _ in owners)
        one_direction = 4 * (numel - owned_numel if stage else (world_size - 1) * numel)
        totals = [sum(counts) for counts in zip(*gather_objects(sent), strict=True)]
        assert totals == [count * one_direction for count in directions], (stage, totals, one_direction)
        numels = gather_objects(numel_of_states(optimizer))
        assert sum(numels) == numel_of_states(plain_optimizer) > max(numels), (stage, numels)


def test_a_step_sends_what_owners_lack_and_states_are_kept_once(ranks_pool: RanksPool) -> None:
    """Owners get what they lack (DDP: nothing; ZeRO-1 after a forward: only gradients) and send parameters back."""
    ranks_pool.run(3, count_bytes_and_states)


def train_with_owners(rank: int, world_size: int) -> None:
    policy = tz.Policy(stage=2, owned=("*",))  # the matrices; biases have rows
    x = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    plain, mine = fresh(Mlp), x.tensor_split(world_size)[rank]
    model = sharded(plain, policy)
    muon, nbytes = tz.whole(optim.Muon, matrices_of(model)), 0
    for _ in range(2):
        with count_sends() as messages:
            model(mine).square().mean().backward()
            to_owners = sum(messages)
            muon.step()
        nbytes = sum(messages) - to_owners
        model.zero_grad()
    of_matrices, of_all = (
        sum(4 * param.numel() for param in each) for each in (matrices_of(plain), plain.parameters())
    )
    of_biases = 2 * (of_all - of_matrices)  # gathered and reduced
    sums = [sum(counts) for counts in zip(*gather_objects((to_owners, nbytes)), strict=True)]
    assert sums == [(world_size - 1) * (of_matrices + of_biases), (world_size - 1) * of_matrices], sums
    # torch's clip and optimizers sum the owner's gradient and zeros
    model = sharded(plain, policy)
    both = [optim.AdamW(module.parameters(), 0.01) for module in (model, plain)]
    for _ in range(3):
        for module, part, optimizer in zip((model, plain), (mine, x), both, strict=True):
            optimizer.zero_grad()
            module(part).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
    full = tz.full_state_dict(model)
    assert all(relative_error(full[name], value) < 1e-5 for name, value in plain.state_dict().items())


def test_gradients_of_owned_parameters_are_sent_to_their_owners_alone(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, train_with_owners)


WIDTH = 192  # large enough that half of a matrix is its own message


def record_order(rank: int, world_size: int) -> None:
    """Step four buckets; check the order of events and the bytes that each bucket's step adds."""
    model = sharded(fresh(Mlp, WIDTH, 8), tz.Policy(stage=3, bucket_bytes=0))
    optimizer = tz.whole(optim.Muon, matrices_of(model))
    set_gradients(model, make_gradients(fresh(Mlp, WIDTH, 8), 0))
    optimizer.step()
    events, added_bytes = [], []
    trade, step, at_rest = TaggedTransport.trade, stepper.BucketStepper.step, bytes_of(storages().values())

    def record_trade(self: Any, outgoing: Any, incoming: Any, over: str = SHARD) -> Any:
        events.append("to" if sum(map(len, outgoing.values())) == 2 * (world_size - 1) else "from")
        return trade(self, outgoing, incoming, over)

    def record_step(self: Any, *args: Any) -> Any:
        events.append("step")
        added_bytes.append(bytes_of(storages().values()) - at_rest)
        return step(self, *args)

    patch = mock.patch.object
    with patch(TaggedTransport, "trade", record_trade), patch(stepper.BucketStepper, "step", record_step):
        optimizer.step()
    assert events == ["to", *["to", "step", "from"] * 3, "step", "from"], events
    assert 2 <= min(added_bytes) / (4 * WIDTH**2) <= max(added_bytes) / (4 * WIDTH**2) < 6, added_bytes


def test_messages_of_the_next_bucket_overlap_a_step_and_three_buckets_are_in_memory(ranks_pool: RanksPool) -> None:
    """In memory: a bucket's matrix and gradient, the next bucket's, the last matrix, and rows that arrive."""
    ranks_pool.run(2, record_order)


# Steps by hand: policies


class Odd(nn.Module):
    """A module of parameters whose shapes and dtypes are hard to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, 6))
        self.many = nn.Parameter(torch.randn(11, 3))
        self.turned = nn.Parameter(torch.randn(7, 9).t())
        self.kernel = nn.Parameter(torch.randn(5, 2, 3))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.lower = nn.Parameter(torch.randn(6, 5).bfloat16())
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)


HALF = torch.bfloat16
POLICIES = {
    "stage 0": tz.Policy(stage=0, bucket_bytes=0),
    "stage 1": tz.Policy(stage=1, bucket_bytes=100),
    "stage 2": tz.Policy(stage=2),
    "stage 3": tz.Policy(stage=3, bucket_bytes=300),
    "mixed precision": tz.Policy(stage=3, mixed_precision=tz.MixedPrecision(HALF, torch.float32)),
    "cast and resident": tz.Policy(stage=1, mixed_precision=tz.MixedPrecision(HALF)),
    "offload": tz.Policy(stage=2, cpu_offload=True),
    "some replicated": tz.Policy(stage=3, replicate_below_bytes=100),
    "two copies": tz.Policy(stage=3),
}


@pytest.mark.filterwarnings("ignore:cpu_offload")
def take_odd_steps(rank: int, world_size: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if name == "two copies" else None
    model = thunder.jit(fresh(Odd), transforms=[tz.ZeroTransform(POLICIES[name], mesh=mesh)])
    assert_steps(model, fresh(Odd), optim.Adafactor, lr=0.01)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (3, "stage 1"),
        (3, "stage 3"),
        *slow((3, "stage 0"), (1, "stage 2"), (4, "mixed precision"), (2, "cast and resident")),
        *slow((3, "offload"), (4, "some replicated"), (4, "two copies")),
    ],
)
@pytest.mark.filterwarnings("ignore:cpu_offload")
def test_each_step_equals_the_plain_step_bit_for_bit(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    """Some gradients are missing in the second step."""
    ranks_pool.run(world_size, take_odd_steps, name)


def step_from_odd_beginnings(rank: int, world_size: int) -> None:
    """Step with more ranks than matrices, without any gradient, and after writes through ``.data``."""
    with torch.device("meta"):
        empty = Mlp(7, 2)
    torch.manual_seed(0)
    model = thunder.jit(empty, transforms=[tz.ZeroTransform(stage=3)])
    assert_steps(model, fresh(Mlp, 7, 2), optim.Muon, matrices_of, lr=0.1)
    model, plain = sharded(fresh(Mlp), 1), fresh(Mlp)
    tz.whole(optim.Adafactor, model.parameters()).step()
    assert_equal(model, plain)
    for param in (*model.parameters(), *plain.parameters()):
        param.data.mul_(1.5)
    assert_steps(model, plain, optim.Adafactor)


def test_steps_are_right_from_odd_beginnings(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, step_from_odd_beginnings)


# Steps by hand: kinds of optimizers


class Script(CustomOptimizer):
    """An optimizer with habits of scripts: strict group keys, kept initial values, counts in groups, lists in states.

    It steps parameters without a gradient, and reads attributes and names of parameters.
    """

    def __init__(self, params: Any, lr: float = 0.1, power: float = 1.0) -> None:
        for group in params:
            assert group.keys() - {"param_names"} <= {"params", "lr", "power", "count"}, group.keys()
        super().__init__(params, lr, power=power, count=0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # torch's constructor calls this, too
        for param in self.param_groups[-1]["params"]:
            self.state[param] |= {"anchor": param.detach().clone(), "past": []}

    def change(self, group: dict[str, Any], params: list[Any]) -> None:
        group["count"] += 1
        for param, name in zip(group["params"], group["param_names"], strict=True):
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if "1.bias" not in name:
                state = self.state[param]
                state["past"].append(param.grad.norm())
                pull = param.grad / (1 + sum(state["past"])) + param - state["anchor"]
                param -= group["lr"] * (1 + getattr(param, "twice", False)) * pull / group["count"] ** group["power"]


def take_script_steps(model: Any, plain: nn.Module) -> Any:
    """Step without some gradients, add a group later, change attributes and options, and use a scheduler."""
    names = [name for name, _ in plain.named_parameters()]
    owners: list[int] = []
    schedulers: dict[Any, Any] = {}

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        pairs = list(module.named_parameters())
        return [{"params": pairs[:2], "lr": 0.3}, {"params": pairs[2:4]}]

    def change(step: int, optimizer: Any, module: nn.Module) -> None:
        param: Any = module.get_parameter("layers.1.weight")
        if step == 0 and module is model:
            owners.extend(member.owner for member in optimizer.members)
        elif step == 1:
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.add_param_group({"params": list(module.named_parameters())[4:], "power": 0.5})
            param.twice = True
            schedulers[optimizer] = optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        elif step > 1:
            vars(param).pop("twice", None)
            schedulers[optimizer].step()

    missing = {0: names[:1], 1: names[4:5], 2: (names[1], names[4])}
    options: dict[str, Any] = {"missing": missing, "before": change, "power": 2.0}
    optimizer, plain_optimizer = assert_steps(model, plain, Script, groups, steps=4, **options)
    for group, expected in zip(optimizer.param_groups, plain_optimizer.param_groups, strict=True):
        assert {**group, "params": 0} == {**expected, "params": 0}, (group, expected)
    assert [member.owner for member in optimizer.members][: len(owners)] == owners, owners
    marked = [name for name, param in model.named_parameters() if hasattr(param, "twice")]
    assert marked == ["layers.0.weight"], marked
    return optimizer


def assert_own_states(whole: Any, rank: int, world_size: int) -> None:
    """Check that a rank has only the states that it owns, and that all ranks know the owners."""
    assert whole.state, "owns nothing"
    assert all(whole.owner_of(shard) == rank for shard in whole.state), "a state of another owner"
    saved, count = whole.state_dict(), len(whole.state)
    whole.state.clear()
    whole.load_state_dict(saved)
    assert len(whole.state) == count, whole.state
    others_states: Any = {index: {"past": []} for index in range(6) if index not in saved["state"]}
    elsewhere = {**saved, "state": others_states}
    fails(lambda: whole.load_state_dict(elsewhere), f"owns, and this is rank {rank}: another rank saved it")
    title, *lines = repr(whole).splitlines()[-1 - world_size :]
    assert "Script of whole parameters of model " in title, title
    for index, line in enumerate(lines):
        assert f"rank {index} owns" in line, line
    for index in range(3):
        assert sum(f"layers.{index}.weight" in line for line in lines) == 1, lines


def step_odd_optimizers(rank: int, world_size: int, stage: int) -> None:
    policy = tz.Policy(stage=stage, bucket_bytes=100)
    plain, other = fresh(Mlp), fresh(Mlp)
    for module in (plain, other):
        module.layers[0].weight.twice = True
    whole = take_script_steps(thunder.jit(other, transforms=[tz.ZeroTransform(policy)]), plain)
    assert_own_states(whole, rank, world_size)
    assert_steps(sharded(fresh(Mlp), policy), fresh(Mlp), CoupledIfAsked, lr=0.1)  # counts in place, in each bucket


@pytest.mark.parametrize(("world_size", "stage"), [(3, 3), *slow((2, 0), (3, 1), (2, 2))])
def test_script_optimizers_keep_keys_values_attributes_names_and_counts(
    ranks_pool: RanksPool, world_size: int, stage: int
) -> None:
    """Owners build and step optimizers as a script does, with its groups, values, attributes, names and options."""
    ranks_pool.run(world_size, step_odd_optimizers, stage)


PACKAGE = {"Shampoo": (0, 0.1), "SOAP": (1, 0.01), "Lamb": (2, 0.01), "AdaFactor": (3, 0.01)}  # stage, rate


def step_package_optimizers(rank: int, world_size: int) -> None:
    import pytorch_optimizer

    for name, (stage, rate) in PACKAGE.items():
        plain, model = fresh(Mlp), sharded(fresh(Mlp), tz.Policy(stage=stage, bucket_bytes=300))
        kind = getattr(pytorch_optimizer, name)
        both = tz.whole(kind, model.parameters(), lr=rate), kind(plain.parameters(), lr=rate)
        for step in range(8):
            step_both(model, plain, both, make_gradients(plain, step))
        full, start = tz.full_state_dict(model), fresh(Mlp).state_dict()
        for key, expected in plain.state_dict().items():
            assert relative_error(full[key], expected) < 1e-5, (name, key, relative_error(full[key], expected))
        assert max(relative_error(full[key], start[key]) for key in full) > 1e-3, name


@pytest.mark.slow
def test_optimizers_of_a_package_step_as_in_one_process(ranks_pool: RanksPool) -> None:
    pytest.importorskip("pytorch_optimizer")
    ranks_pool.run(2, step_package_optimizers)

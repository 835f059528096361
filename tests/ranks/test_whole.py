"""``tz.whole``: an ordinary optimizer on whole parameters takes the same steps as on one process.

Most steps here are on gradients that are set by hand, so that no forward is compiled; they are equal bit for bit.
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
from tests.harness.models import Mlp, Small, count_sends, fresh, relative_error, sharded, storages
from tests.harness.ranks import RanksPool
from tests.harness.tiers import deep, slow
from tests.harness.whole_steps import CoupledIfAsked, CustomOptimizer, make_gradients, set_gradients
from thunder_zero.comm.collective_tags import TaggedTransport
from thunder_zero.optim import stepper
from thunder_zero.plan import layout
from thunder_zero.plan.mesh import SHARD

import thunder


def matrices(of: nn.Module) -> list[nn.Parameter]:
    return [param for param in of.parameters() if param.ndim == 2]


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
    before: Callable[[int, Any, nn.Module], object] = lambda step, optimizer, of: None,
    **options: Any,
) -> tuple[Any, optim.Optimizer]:
    """``tz.whole`` of the model does, bit for bit, what the optimizer does on the plain module; returns both.

    Args:
        groups: of a module, what its optimizer is made on.
        missing: by step, names that have no gradient, beside those that ``gradients`` leaves out.
        before: called before each step, with each optimizer and its module.
    """
    both = tz.whole(kind, groups(model), **options), kind(groups(plain), **options)
    for step in range(steps):
        for optimizer, of in zip(both, (model, plain), strict=True):
            before(step, optimizer, of)
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
            own = tokens(2 * step + micro).tensor_split(world_size)[rank]
            with model.no_sync() if micro == 0 and is_sharded else nullcontext():
                scaler.scale(model(own).square().mean()).backward()
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


def muon_and_adamw(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
    others = [param for param in model.parameters() if param.ndim != 2]
    return [make(optim.Muon, matrices(model), lr=0.02), optim.AdamW(others, lr=0.01)]


def adafactor(model: nn.Module, make: Callable[..., Any]) -> list[Any]:
    return [make(optim.Adafactor, model.parameters(), lr=0.01)]


def like_one_process(rank: int, world_size: int, stage: int) -> None:
    start = fresh(Small).double()
    model = sharded(start, tz.Policy(stage=stage, bucket_bytes=400))
    for way in (muon_and_adamw, adafactor):
        plain = fresh(Small).double()
        train(plain, way(plain, lambda kind, *args, **options: kind(*args, **options)))
        model.load_original_state_dict(start.state_dict())
        train(model, way(model, tz.whole), rank, world_size)
        full = tz.full_state_dict(model)
        for name, right in plain.state_dict().items():
            assert relative_error(full[name], right) < 1e-5, (way, name, relative_error(full[name], right))
        assert relative_error(full["layers.0.weight"], start.layers[0].weight) > 0.05, way


@pytest.mark.timeout(180)
@pytest.mark.parametrize("stage", [*slow(3, 1), *deep(0, 2)])
def test_training_is_that_of_one_process(ranks_pool: RanksPool, stage: int) -> None:
    """With accumulation, clipping, one scaler for two optimizers, schedulers, a tied, a frozen and an unused parameter,
    rows that the ranks do not divide, and more ranks than rows."""
    ranks_pool.run(3, like_one_process, stage, timeout=170)


# Steps by hand: what is sent and kept


def numel_of_states(optimizer: Any) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() for value in values if isinstance(value, Tensor) and value.numel() > 1)


def sent_and_kept(rank: int, world_size: int) -> None:
    for stage, ways in enumerate(([1, 1], [2, 3], [3, 3], [3, 3])):  # in the first step, and in the second
        plain = fresh(Mlp)
        model = sharded(plain, tz.Policy(stage=stage, bucket_bytes=200))
        whole, ordinary = tz.whole(optim.Adafactor, model.parameters()), optim.Adafactor(plain.parameters())
        sent = []
        for _ in ways:
            with count_sends() as messages:
                step_both(model, plain, (whole, ordinary), make_gradients(plain, 0))
            sent.append(sum(messages))
        owners = [(of.param.shape, of.owner) for of in whole.members]
        assert gather_objects(owners) == [owners] * world_size, (stage, owners)
        of_owners = sum(layout.owned_numel(shape, world_size, owner) for shape, owner in owners)
        numel = sum(prod(shape) for shape, _ in owners)
        one_way = 4 * (numel - of_owners if stage else (world_size - 1) * numel)
        totals = [sum(counts) for counts in zip(*gather_objects(sent), strict=True)]
        assert totals == [count * one_way for count in ways], (stage, totals, one_way)
        kept = gather_objects(numel_of_states(whole))
        assert sum(kept) == numel_of_states(ordinary) > max(kept), (stage, kept)


def test_a_step_sends_what_owners_lack_and_states_are_kept_once(ranks_pool: RanksPool) -> None:
    """Gradient and parameter go to the owner, the parameter comes back; in ZeRO-1 the owner has the parameter that a
    forward has gathered, so not in a second step in a row; in ZeRO-0 only the way back has messages."""
    ranks_pool.run(3, sent_and_kept)


WIDTH = 192  # so that half of a matrix is a message of its own


def ordered(rank: int, world_size: int) -> None:
    """A step of four buckets: what happens in order, and the bytes in each bucket's step beyond those before."""
    model = sharded(fresh(Mlp, WIDTH, 8), tz.Policy(stage=3, bucket_bytes=0))
    optimizer = tz.whole(optim.Muon, matrices(model))
    set_gradients(model, make_gradients(fresh(Mlp, WIDTH, 8), 0))
    optimizer.step()
    events, held = [], []
    trade, step, at_rest = TaggedTransport.trade, stepper.BucketStepper.step, sum(storages().values())

    def traded(self: Any, outgoing: Any, incoming: Any, over: str = SHARD) -> Any:
        events.append("to" if sum(map(len, outgoing.values())) == 2 * (world_size - 1) else "from")
        return trade(self, outgoing, incoming, over)

    def stepped(self: Any, *args: Any) -> Any:
        events.append("step")
        held.append(sum(storages().values()) - at_rest)
        return step(self, *args)

    with mock.patch.object(TaggedTransport, "trade", traded), mock.patch.object(stepper.BucketStepper, "step", stepped):
        optimizer.step()
    assert events == ["to", *["to", "step", "from"] * 3, "step", "from"], events
    assert 2 <= min(held) / (4 * WIDTH**2) <= max(held) / (4 * WIDTH**2) < 6, held


def test_the_next_bucket_travels_during_a_step_and_three_are_in_memory(ranks_pool: RanksPool) -> None:
    """Each rank owns one matrix of a bucket: the matrix, its gradient, those of the next one, the last one on its way
    back, and rows that arrive. All at once would be eight."""
    ranks_pool.run(2, ordered)


# Steps by hand: policies


class Odd(nn.Module):
    """Has parameters of shapes and dtypes that ranks share badly."""

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
def odd_steps(rank: int, world_size: int, name: str) -> None:
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
def test_each_step_is_the_ordinary_one_bit_for_bit(ranks_pool: RanksPool, world_size: int, name: str) -> None:
    """Gradients are equal; some are missing in the second step."""
    ranks_pool.run(world_size, odd_steps, name)


def odd_beginnings(rank: int, world_size: int) -> None:
    """More ranks than matrices, from the meta device; no gradient on any rank; values written without torch."""
    with torch.device("meta"):
        empty = Mlp(7, 2)
    torch.manual_seed(0)
    model = thunder.jit(empty, transforms=[tz.ZeroTransform(stage=3)])
    assert_steps(model, fresh(Mlp, 7, 2), optim.Muon, matrices, lr=0.1)
    model, plain = sharded(fresh(Mlp), 1), fresh(Mlp)
    tz.whole(optim.Adafactor, model.parameters()).step()
    assert_equal(model, plain)
    for param in (*model.parameters(), *plain.parameters()):
        param.data.mul_(1.5)
    assert_steps(model, plain, optim.Adafactor)


def test_steps_from_odd_beginnings(ranks_pool: RanksPool) -> None:
    ranks_pool.run(3, odd_beginnings)


# Steps by hand: optimizers of all kinds


class Script(CustomOptimizer):
    """As those of many scripts: takes groups of certain keys only, steps parameters without a gradient, too, keeps
    values from when it was made, counts in its groups, has lists in its states, and asks for attributes and names."""

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


def script_steps(model: Any, plain: nn.Module) -> Any:
    """Parameters without a gradient; a group that comes later; attributes and
    options that change, and a scheduler, which adds some."""
    names = [name for name, _ in plain.named_parameters()]
    owners: list[int] = []
    schedulers: dict[Any, Any] = {}

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        pairs = list(of.named_parameters())
        return [{"params": pairs[:2], "lr": 0.3}, {"params": pairs[2:4]}]

    def change(step: int, optimizer: Any, of: nn.Module) -> None:
        param: Any = of.get_parameter("layers.1.weight")
        if step == 0 and of is model:
            owners.extend(member.owner for member in optimizer.members)
        elif step == 1:
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.add_param_group({"params": list(of.named_parameters())[4:], "power": 0.5})
            param.twice = True
            schedulers[optimizer] = optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        elif step > 1:
            vars(param).pop("twice", None)
            schedulers[optimizer].step()

    missing = {0: names[:1], 1: names[4:5], 2: (names[1], names[4])}
    whole, ordinary = assert_steps(model, plain, Script, groups, steps=4, missing=missing, before=change, power=2.0)
    for group, right in zip(whole.param_groups, ordinary.param_groups, strict=True):
        assert {**group, "params": 0} == {**right, "params": 0}, (group, right)
    assert [member.owner for member in whole.members][: len(owners)] == owners, owners
    marked = [name for name, param in model.named_parameters() if hasattr(param, "twice")]
    assert marked == ["layers.0.weight"], marked
    return whole


def assert_own_states(whole: Any, rank: int, world_size: int) -> None:
    """Check that a rank has only the states that it owns, and that all ranks know the owners."""
    assert whole.state, "owns nothing"
    assert all(whole.owner_of(shard) == rank for shard in whole.state), "a state of another owner"
    saved, count = whole.state_dict(), len(whole.state)
    whole.state.clear()
    whole.load_state_dict(saved)
    assert len(whole.state) == count, whole.state
    of_others: Any = {number: {"past": []} for number in range(6) if number not in saved["state"]}
    elsewhere = {**saved, "state": of_others}
    fails(lambda: whole.load_state_dict(elsewhere), f"owns, and this is rank {rank}: another rank saved it")
    title, *lines = repr(whole).splitlines()[-1 - world_size :]
    assert "Script of whole parameters of model " in title, title
    for number, line in enumerate(lines):
        assert f"rank {number} owns" in line, line
    for at in range(3):
        assert sum(f"layers.{at}.weight" in line for line in lines) == 1, lines


def odd_optimizers(rank: int, world_size: int, stage: int) -> None:
    policy = tz.Policy(stage=stage, bucket_bytes=100)
    plain, other = fresh(Mlp), fresh(Mlp)
    for module in (plain, other):
        module.layers[0].weight.twice = True
    whole = script_steps(thunder.jit(other, transforms=[tz.ZeroTransform(policy)]), plain)
    assert_own_states(whole, rank, world_size)
    assert_steps(sharded(fresh(Mlp), policy), fresh(Mlp), CoupledIfAsked, lr=0.1)  # counts in place, in each bucket


@pytest.mark.parametrize(("world_size", "stage"), [(3, 3), *slow((2, 0), (3, 1), (2, 2))])
def test_optimizers_keep_their_keys_values_marks_names_and_counts(
    ranks_pool: RanksPool, world_size: int, stage: int
) -> None:
    """Owners make and step optimizers as a script does: with groups of the constructor's keys, the values of parameters
    without gradients, attributes and names of parameters, and options that a bucket's step changes."""
    ranks_pool.run(world_size, odd_optimizers, stage)


PACKAGE = {"Shampoo": (0, 0.1), "SOAP": (1, 0.01), "Lamb": (2, 0.01), "AdaFactor": (3, 0.01)}  # stage, rate


def of_a_package(rank: int, world_size: int) -> None:
    import pytorch_optimizer

    for name, (stage, rate) in PACKAGE.items():
        plain, model = fresh(Mlp), sharded(fresh(Mlp), tz.Policy(stage=stage, bucket_bytes=300))
        kind = getattr(pytorch_optimizer, name)
        both = tz.whole(kind, model.parameters(), lr=rate), kind(plain.parameters(), lr=rate)
        for step in range(8):
            step_both(model, plain, both, make_gradients(plain, step))
        full, start = tz.full_state_dict(model), fresh(Mlp).state_dict()
        for key, right in plain.state_dict().items():
            assert relative_error(full[key], right) < 1e-5, (name, key, relative_error(full[key], right))
        assert max(relative_error(full[key], start[key]) for key in full) > 1e-3, name


@pytest.mark.slow
def test_optimizers_of_a_package_are_those_of_one_process(ranks_pool: RanksPool) -> None:
    pytest.importorskip("pytorch_optimizer")
    ranks_pool.run(2, of_a_package)

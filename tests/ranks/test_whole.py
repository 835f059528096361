"""``tz.whole``: an ordinary optimizer on whole parameters, as on one process; wrong owners and lost rows are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import Mlp, Small, count_sends, error, fresh, sharded, storages
from tests.harness.ranks import RanksPool
from tests.harness.tiers import of_tier
from thunder_zero import layout
from thunder_zero.comm.placed import Placed
from thunder_zero.rows import own_rows
from thunder_zero.runtime.resident import ResidentParameters
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.state_dict import StateDictOptions, get_optimizer_state_dict
from thunder_zero.whole_step import members, owners, stepper
from thunder_zero.whole_step.exchange import FromOwners

import thunder

STAGES, STEPS, ROWS = (0, 1, 2, 3), 20, 12
FULL = StateDictOptions(full_state_dict=True)
Named = Mapping[str, nn.Parameter]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def parts(model: nn.Module, plain: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices and the other parameters, by their shapes in the plain module."""
    shapes = {name: param.ndim for name, param in plain.named_parameters()}
    found = [(param, shapes[name] == 2) for name, param in model.named_parameters()]
    return [param for param, is_matrix in found if is_matrix], [param for param, is_matrix in found if not is_matrix]


def muon_and_adamw(model: nn.Module, muon: Callable[..., Any]) -> list[optim.Optimizer]:
    matrices, others = parts(model, fresh(Small))
    return [muon(matrices, lr=0.02), optim.AdamW(others, lr=0.01)]


def adafactor(model: nn.Module, kind: Callable[..., Any]) -> list[optim.Optimizer]:
    return [kind(model.parameters(), lr=0.01)]


WAYS: dict[str, tuple[Any, type[optim.Optimizer]]] = {
    "muon and adamw": (muon_and_adamw, optim.Muon),
    "adafactor": (adafactor, optim.Adafactor),
}


def tokens(step: int) -> Tensor:
    return torch.randint(0, 9, (ROWS, 3), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizers: list[optim.Optimizer], rank: int, world_size: int) -> list[int]:
    """Twenty steps of two micro-batches, with one scaler, clipping and a scheduler; returns the bytes of each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedulers = [optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers]
    counts = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            own = tokens(2 * step + micro).tensor_split(world_size)[rank]
            with model.no_sync() if micro == 0 and isinstance(model, tz.ZeroModule) else nullcontext():
                scaler.scale(model(own).square().mean()).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip = tz.clip_grad_norm_ if isinstance(model, tz.ZeroModule) else of_parameters
        clip(model, 0.5)
        with count_sends() as sent:
            for optimizer in optimizers:
                scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        counts.append(sum(sent))
    return counts


def of_parameters(model: nn.Module, max_norm: float) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def numel_of(values: Iterable[Any]) -> int:
    return sum(value.numel() for value in values if isinstance(value, Tensor) and value.numel() > 1)


def like_one_process(rank: int, world_size: int) -> dict[tuple[int, str], Any]:
    """By stage and optimizers: the error, the bytes of a step, the elements of states here and in one process."""
    right, states = {}, {}
    for way, (make, kind) in WAYS.items():
        model = fresh(Small).double()
        optimizers = make(model, kind)
        train(model, optimizers, 0, 1)
        right[way] = dict(model.state_dict())
        states[way] = numel_of(value for state in optimizers[0].state.values() for value in state.values())
    found: dict[tuple[int, str], Any] = {}
    for stage in STAGES:
        model = thunder.jit(fresh(Small).double(), transforms=[tz.ZeroTransform(stage=stage, bucket_bytes=400)])
        for way, (make, kind) in WAYS.items():
            model.load_original_state_dict(fresh(Small).double().state_dict())
            optimizers = make(model, lambda *args, kind=kind, **options: tz.whole(kind, *args, **options))
            sent = train(model, optimizers, rank, world_size)
            full = tz.full_state_dict(model)
            whole = optimizers[0]
            found[stage, way] = {
                "error": max(error(full[name], right[way][name]) for name in right[way]),
                "moved": error(full["layers.0.weight"], fresh(Small).double().layers[0].weight),
                "sent": sent,
                "owned": [(of.param, of.owner) for of in whole.members],
                "states": numel_of(value for state in whole.state.values() for value in state.values()),
                "states alone": states[way],
            }
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, ranks_pool: RanksPool) -> list[dict[tuple[int, str], Any]]:
    return ranks_pool.run(request.param, like_one_process, timeout=230)


def test_twenty_steps_are_those_of_one_process(ranks: list[dict[tuple[int, str], Any]]) -> None:
    """With accumulation, clipping, one scaler for two optimizers, a scheduler, frozen and unused parameters, rows that
    the ranks do not divide, and more ranks than rows."""
    for found in ranks:
        for (stage, way), of in found.items():
            assert of["error"] < 1e-5, (stage, way, of["error"])
            assert of["moved"] > 0.05, (stage, way)


def test_a_step_sends_what_owners_lack_and_states_are_kept_once(ranks: list[dict[tuple[int, str], Any]]) -> None:
    """Gradient and parameter go to the owner, the parameter comes back; in ZeRO-1 the owner has the parameter; of a
    replicated one only the way back has messages."""
    for key in ranks[0]:
        owned = ranks[0][key]["owned"]
        stepped = [(param, owner) for param, owner in owned if param.path != "unused"]
        unused = ((param, owner) for param, owner in owned if param.path == "unused" and param.sharded)
        lacking = (
            (param, prod(param.shape) - layout.owned_numel(param.shape, len(ranks), owner)) for param, owner in unused
        )
        once = sum(numel * param.dtype.itemsize for param, numel in lacking)  # to make an owner's optimizer
        total = 0
        for param, owner in stepped:
            here = layout.owned_numel(param.shape, len(ranks), owner)
            ways = 2 if param.resident else 3
            numel = ways * (prod(param.shape) - here) if param.sharded else (len(ranks) - 1) * prod(param.shape)
            total += numel * param.dtype.itemsize
        for step in range(STEPS):
            assert sum(found[key]["sent"][step] for found in ranks) == total + (0 if step else once), key
        assert sum(found[key]["states"] for found in ranks) == ranks[0][key]["states alone"]
        assert [found[key]["owned"] for found in ranks] == [owned] * len(ranks)


# Steps on gradients that are set by hand: no forward is compiled


def gradients(module: nn.Module, step: int) -> dict[str, Tensor]:
    """Full gradients of many scales; one parameter in three has none in step 1, an empty one never
    (torch's Adafactor divides by its size)."""
    generator = torch.Generator().manual_seed(step)
    drawn = {
        name: (torch.randn(param.shape, generator=generator) * 10.0 ** (at % 5 - 2)).to(param.dtype)
        for at, (name, param) in enumerate(module.named_parameters())
    }
    return {name: grad for at, (name, grad) in enumerate(drawn.items()) if grad.numel() and (step != 1 or at % 3)}


def give(model: Any, grads: Mapping[str, Tensor]) -> None:
    """This rank's rows of full gradients."""
    state = sharded_model(model).state
    for path, shard in state.shards.items():
        param = state.plan.by_name[path]
        if shard.requires_grad:
            shard.grad = own_rows(grads[path], param, state.plan).clone() if path in grads else None


def named(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    found = dict(model.named_parameters())
    return [found[name] for name in names]


def steps_differ(model: Any, plain: nn.Module, make: Callable[..., Any], steps: int = 3, **options: Any) -> list[str]:
    """The names of the parameters that differ in a bit from those of the ordinary optimizer on one process."""
    names = [name for name, param in plain.named_parameters() if param.ndim == 2] if make is optim.Muon else None
    names = [name for name, _ in plain.named_parameters()] if names is None else names
    optimizer, ordinary = tz.whole(make, named(model, names), **options), make(named(plain, names), **options)
    for step in range(steps):
        step_both(model, plain, optimizer, ordinary, gradients(plain, step))
    return differing(model, plain)


def step_both(model: Any, plain: nn.Module, whole: Any, ordinary: optim.Optimizer, grads: Mapping[str, Tensor]) -> None:
    """Step the sharded model and the plain one with the same gradients."""
    give(model, grads)
    for name, param in plain.named_parameters():
        param.grad = grads[name].clone() if name in grads and param.requires_grad else None
    whole.step()
    ordinary.step()


def differing(model: Any, plain: nn.Module) -> list[str]:
    full = tz.full_state_dict(model)
    return [name for name, param in plain.named_parameters() if not torch.equal(full[name], param.detach())]


class Odd(nn.Module):
    """Parameters of shapes and dtypes that ranks share badly."""

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

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar


POLICIES: dict[str, tz.Policy] = {
    **{f"stage {stage}": tz.Policy(stage=stage, bucket_bytes=(0, 100, None, 300)[stage]) for stage in STAGES},
    "mixed precision": tz.Policy(stage=3, mixed_precision=tz.MixedPrecision(torch.bfloat16, torch.float32)),
    "cast and resident": tz.Policy(stage=1, mixed_precision=tz.MixedPrecision(torch.bfloat16)),
    "offload": tz.Policy(stage=2, cpu_offload=True),
    "some replicated": tz.Policy(stage=3, replicate_below_bytes=100),
}


@pytest.mark.filterwarnings("ignore:cpu_offload")
def many_policies(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        found[name] = steps_differ(sharded(fresh(Odd), policy), fresh(Odd), optim.Adafactor, lr=0.01)
    with torch.device("meta"):
        empty = Mlp()
    torch.manual_seed(0)
    model = thunder.jit(empty, transforms=[tz.ZeroTransform(stage=3)])
    found["meta, more ranks than matrices"] = steps_differ(model, fresh(Mlp), optim.Muon, lr=0.1)
    model, plain = sharded(fresh(Mlp), 1), fresh(Mlp)
    tz.whole(optim.Adafactor, model.parameters()).step()
    found["no gradient on any rank"] = differing(model, plain)
    for param in (*model.parameters(), *plain.parameters()):
        param.data.mul_(1.5)
    found["written through data"] = steps_differ(model, plain, optim.Adafactor)
    copies = (world_size // 2, 2) if world_size % 2 == 0 else (world_size, 1)
    mesh = init_device_mesh("cpu", copies, mesh_dim_names=("replicate", "shard"))
    for stage in (0, 3):
        model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(stage=stage, mesh=mesh)])
        found[f"copies in stage {stage}"] = steps_differ(model, fresh(Mlp), optim.Adafactor)
    return found


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.filterwarnings("ignore:cpu_offload")
def test_each_step_is_the_ordinary_one_bit_for_bit(ranks_pool: RanksPool, world_size: int) -> None:
    """On the same gradients; some are missing in the second step."""
    for found in ranks_pool.run(world_size, many_policies, timeout=110):
        assert found.keys() >= POLICIES.keys()
        assert {name: differ for name, differ in found.items() if differ} == {}


class Counting(optim.Optimizer):
    """Keeps a number in its group and a list in its state; couples elements."""

    def __init__(self, params: Any, lr: float = 0.1, power: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "power": power, "count": 0})

    def evaluate(self) -> None:
        """A method that torch's classes do not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    past = self.state[param].setdefault("past", [])
                    past.append(param.grad.norm())
                    param -= group["lr"] * param.grad / (sum(past) + group["count"] ** group["power"])


def groups_change(rank: int, world_size: int) -> dict[str, Any]:
    """Groups with names, one that comes later, hyper-parameters that the optimizer and a user change."""
    found: dict[str, Any] = {}
    model, plain = sharded(fresh(Mlp), 3), fresh(Mlp)

    def build(kind: Any, of: nn.Module) -> Any:
        pairs = list(of.named_parameters())
        groups: list[dict[str, Any]] = [{"params": pairs[:2], "lr": 0.3}, {"params": pairs[2:4]}]
        return kind(groups, power=2.0)

    whole, ordinary = build(lambda *args, **kw: tz.whole(Counting, *args, **kw), model), build(Counting, plain)
    before = [of.owner for of in whole.members]
    for step in range(4):
        if step == 2:
            for optimizer, of in ((whole, model), (ordinary, plain)):
                optimizer.param_groups[0]["lr"] = 0.5
                optimizer.add_param_group({"params": list(of.named_parameters())[4:], "power": 0.5})
        step_both(model, plain, whole, ordinary, gradients(plain, step))
    found["differ"] = differing(model, plain)
    found["groups"] = [
        {key: value for key, value in group.items() if key != "params"} for group in whole.param_groups
    ] == [{key: value for key, value in group.items() if key != "params"} for group in ordinary.param_groups]
    found["owners stay"] = [of.owner for of in whole.members][: len(before)] == before
    found["text"] = repr(whole)
    found["own states"] = all(whole.owner_of(shard) == rank for shard in whole.state)
    again = tz.whole(Counting, model.parameters())
    its = optim.SGD(model.parameters(), 0.1)
    found["other kind"] = raised(lambda: again.load_state_dict(its.state_dict()))
    state_dict = whole.state_dict()
    whole.state.clear()
    whole.load_state_dict(state_dict)
    found["loaded"] = len(whole.state)
    elsewhere = {
        **state_dict,
        "state": {number: {"past": []} for number in range(6) if number not in state_dict["state"]},
    }
    found["elsewhere"] = raised(lambda: whole.load_state_dict(elsewhere))
    return found


def test_groups_may_come_later_and_keep_numbers(ranks_pool: RanksPool) -> None:
    for rank, found in enumerate(ranks_pool.run(2, groups_change)):
        assert found["differ"] == []
        assert found["groups"]
        assert found["owners stay"]
        assert found["own states"]
        assert found["loaded"] == 3
        assert f"owns, and this is rank {rank}: another rank saved it" in found["elsewhere"], found["elsewhere"]
        assert "Counting of whole parameters of model " in found["text"]
        lines = found["text"].splitlines()[-2:]
        for line, owner in zip(lines, range(2), strict=True):
            assert f"rank {owner} owns" in line
        assert all(sum(f"layers.{at}.weight" in line for line in lines) == 1 for at in range(3)), lines


# Order and memory

WIDTH = 192  # so that half of a matrix is a message of its own


def ordered(rank: int, world_size: int) -> tuple[list[str], list[int]]:
    """What happens in a step of four buckets, in order; and, in each bucket's step, the bytes beyond those before."""
    model = sharded(fresh(Mlp, WIDTH, 8), tz.Policy(stage=3, bucket_bytes=0))
    optimizer = tz.whole(optim.Muon, parts(model, fresh(Mlp, WIDTH, 8))[0])
    grads = gradients(fresh(Mlp, WIDTH, 8), 0)
    give(model, grads)
    optimizer.step()
    events, held = [], []
    trade, step, at_rest = Placed.trade, stepper.Stepper.step, sum(storages().values())

    def traded(self: Any, outgoing: Any, incoming: Any) -> Any:
        sizes = [sum(map(len, mail.values())) for mail in (outgoing, incoming)]
        events.append("to" if sizes[0] == 2 * (world_size - 1) else "from")
        return trade(self, outgoing, incoming)

    def stepped(self: Any, *args: Any) -> Any:
        events.append("step")
        held.append(sum(storages().values()) - at_rest)
        return step(self, *args)

    with mock.patch.object(Placed, "trade", traded), mock.patch.object(stepper.Stepper, "step", stepped):
        optimizer.step()
    return events, held


def test_the_next_bucket_travels_during_a_step_and_three_are_in_memory(ranks_pool: RanksPool) -> None:
    """Each rank owns one matrix of a bucket: the matrix, its gradient, those of the next one, the last one on its way
    back, and rows that arrive. All at once would be eight."""
    for events, held in ranks_pool.run(2, ordered):
        assert events == ["to", *["to", "step", "from"] * 3, "step", "from"]
        assert 2 <= min(held) / (4 * WIDTH**2) <= max(held) / (4 * WIDTH**2) < 6


# Planted faults


def planted(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = sharded(fresh(Mlp), 3)
    assign = owners.assign

    def swapped(*args: Any) -> Any:
        return tuple(replace(of, owners=tuple(1 - owner for owner in of.owners)) for of in assign(*args))

    def all_mine(*args: Any) -> Any:
        return tuple(replace(of, owners=(0,) * len(of.owners)) for of in assign(*args))

    with mock.patch.object(members, "assign", swapped if rank else assign):
        optimizer = tz.whole(optim.Adafactor, model.parameters())
    give(model, gradients(fresh(Mlp), 0))
    found["ranks disagree"] = raised(optimizer.step)
    with mock.patch.object(members, "assign", all_mine):
        found["one owner"] = [of.owner for of in tz.whole(optim.Adafactor, model.parameters()).members]
    found["balanced"] = [of.owner for of in tz.whole(optim.Adafactor, model.parameters()).members]
    wait = FromOwners.wait

    def lose_a_row(self: FromOwners) -> None:
        before = [member.shard.detach()[-1:].clone() for member, _ in self._rows]
        shards = [member.shard for member, _ in self._rows]
        wait(self)
        for shard, row in zip(shards, before, strict=True):
            shard.detach()[-1:] = row

    with mock.patch.object(FromOwners, "wait", lose_a_row if rank == 0 else wait):
        found["lost row"] = steps_differ(sharded(fresh(Mlp), 3), fresh(Mlp), optim.Adafactor)
    step = stepper.Stepper.step

    def rolled(self: Any, values: Any, *args: Any) -> Any:
        rows = {path: replace(of, grad=of.grad.roll(1, 0)) for path, of in values.items()}
        return step(self, rows, *args)

    with mock.patch.object(stepper.Stepper, "step", rolled):
        found["rows of another rank"] = steps_differ(sharded(fresh(Mlp), 2), fresh(Mlp), optim.Adafactor)
    with mock.patch.object(ResidentParameters, "out_of_date", lambda self, paths: [False for _ in paths]):
        found["old parameters"] = steps_differ(sharded(fresh(Mlp), 1), fresh(Mlp), optim.Adafactor)
    found["no fault"] = steps_differ(sharded(fresh(Mlp), 3), fresh(Mlp), optim.Adafactor)
    return found


def test_wrong_owners_and_lost_rows_are_found(ranks_pool: RanksPool) -> None:
    weights = {f"layers.{at}.weight" for at in range(3)}
    for found in ranks_pool.run(2, planted):
        assert "parameter 0 of Adafactor differs between ranks: rank 0 has 'layers." in found["ranks disagree"]
        assert "owned by rank 0, rank 1 has 'layers." in found["ranks disagree"], found["ranks disagree"]
        assert set(found["one owner"]) == {0}
        assert {owner: found["balanced"].count(owner) for owner in (0, 1)} == {
            0: 2,
            1: 4,
        }  # two matrices of three; biases
        assert weights <= set(found["lost row"])
        assert weights <= set(found["rows of another rank"])
        assert weights <= set(found["old parameters"])
        assert found["no fault"] == []


# Bad uses


class Failing(optim.SGD):
    """Fails on one shape, so on one owner."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.shape == (7, 7) and param.grad[0, 0] == 9:
                    raise ValueError("no step on a nine")
        super().step()


class Coupled(optim.SGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum(float(param.grad.norm()) for param in params if param.grad is not None)
        for param in params:
            param -= 0.1 * param.grad / (1 + norm)


def not_an_optimizer(params: Any) -> Any:
    return list(params)


class OwnGroups(optim.SGD):
    """Makes groups of its own."""

    def __init__(self, params: Any) -> None:
        params = [param for group in params for param in group["params"]]
        super().__init__([{"params": params[:1]}, {"params": params[1:]}], 0.1)


class CoupledIfAsked(optim.SGD):
    """Divides by a norm of all gradients if an option says so; counts steps in a tensor, in place."""

    def __init__(self, params: Any, lr: float, norm: float = 0.0) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("norm", norm)
            group.setdefault("count", torch.zeros(()))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            grads = [param.grad for param in group["params"] if param.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm() if group["norm"] and grads else 1.0
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] / group["count"] * param.grad / norm


class CountsItself(optim.SGD):
    """Counts its steps in an attribute."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            param -= 0.1 / self.count * param.grad


class NeedsLoss(optim.SGD):
    """Cannot step without a loss."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)

    def step(self, loss: Any) -> None:  # type: ignore[override]
        super().step()


class CountsWhereItSteps(optim.SGD):
    """Counts the steps of a group in which parameters have gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)
        for group in self.param_groups:
            group.setdefault("steps", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                group["steps"] += 1
                for param in params:
                    param -= 0.1 / group["steps"] * param.grad


class NeedsParameters(optim.SGD):
    """Fails on groups without parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch.stack([param.sum() for param in group["params"]])
        super().step()


def misused_later(rank: int, model: Any, params: list[Any], optimizer: Any) -> dict[str, str]:
    """Habits of torch's users, after a step."""
    found, grads = {}, gradients(fresh(Mlp), 0)
    found["own groups"] = raised(lambda: tz.whole(OwnGroups, params))
    found["copied"] = raised(lambda: deepcopy(optimizer))
    numbered = optimizer.state_dict()
    found["a state of nothing"] = raised(lambda: optimizer.load_state_dict({**numbered, "state": {"k": 1}}))
    for name, values in LATER.items():
        key, before_it = name.split()[-1], dict(optimizer.param_groups[0])
        optimizer.param_groups[0][key] = values[rank]
        give(model, grads)
        found[name] = raised(optimizer.step)
        optimizer.param_groups[0].update(before_it)
    optimizer.param_groups[0]["params"] = params[:2]
    found["by hand"] = raised(optimizer.step)
    optimizer.param_groups[0]["params"] = params
    coupling = tz.whole(CoupledIfAsked, params, lr=0.1)
    coupling.step()
    coupling.param_groups[0]["norm"] = 1.0
    give(model, grads)
    found["coupled later"] = raised(coupling.step)
    counting = tz.whole(CountsItself, params[:2], lr=0.1)
    found["set"] = raised(lambda: setattr(counting, "count", 100))
    counting.mine = 1
    found["group before"] = raised(lambda: counting.add_param_group({"params": params[2:4]}))
    counting.step()
    found["group after"] = raised(lambda: counting.add_param_group({"params": params[4:]}))
    trusting = sharded(fresh(Mlp), tz.Policy(stage=3, trust_optimizer=True, bucket_bytes=64))
    of_kinds = [[param for param in trusting.parameters() if param.ndim == ndim] for ndim in (2, 1)]
    give(trusting, grads)
    counting = tz.whole(CountsWhereItSteps, [{"params": members} for members in of_kinds])
    found["counts, and is trusted"] = raised(counting.step)
    found["no empty group"] = raised(lambda: tz.whole(NeedsParameters, params))
    return found


def misused(rank: int, world_size: int) -> dict[str, str]:
    plain = Mlp()
    model, other = sharded(plain, 3), sharded(fresh(Mlp), 2)
    params = list(model.parameters())
    grads = gradients(fresh(Mlp), 0)
    found = {
        "no model": raised(lambda: tz.whole(optim.Adafactor, [nn.Parameter(torch.ones(2, 2))])),
        "plain module": raised(lambda: tz.whole(optim.Adafactor, model._model.parameters())),
        "two models": raised(lambda: tz.whole(optim.Adafactor, [params[0], next(other.parameters())])),
        "not an optimizer": raised(lambda: tz.whole(not_an_optimizer, params)),
        "needs a closure": raised(lambda: tz.whole(optim.LBFGS, params)),
        "needs a loss": raised(lambda: tz.whole(NeedsLoss, params)),
        "an instance": raised(lambda: tz.whole(optim.SGD(params, 0.1), params)),  # type: ignore[arg-type]
        "a list": raised(lambda: tz.whole(params, optim.SGD)),  # type: ignore[arg-type]
        "a model": raised(lambda: tz.whole(optim.Adafactor, model)),
        "counts where it steps": raised(lambda: tz.whole(CountsWhereItSteps, params)),
        "couples parameters": raised(lambda: tz.whole(Coupled, params, lr=0.1)),
        "no matrix": raised(lambda: tz.whole(optim.Muon, params)),
        "twice": raised(lambda: tz.whole(optim.Adafactor, [{"params": params[:1]}, {"params": params[:1]}])),
        "bad option": raised(lambda: tz.whole(optim.Adafactor, params, lr=-1.0)),
    }
    optimizer = tz.whole(optim.Adafactor, params, lr=0.01)
    found["of the class"] = raised(lambda: tz.whole(Counting, params).evaluate())
    found["of none"] = raised(lambda: optimizer.evaluate())
    found["bad group"] = raised(lambda: optimizer.add_param_group({"params": list(other.parameters())}))
    give(model, grads)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    found["closure"] = raised(lambda: optimizer.step(lambda: 0.0))  # type: ignore[arg-type]
    rates = tz.whole(optim.Adafactor, params, lr=0.01 * (1 + rank))
    found["rates differ"] = raised(rates.step)
    if rank == 1:
        params[2].grad = None
    found["a gradient on one rank"] = raised(optimizer.step)
    params[2].grad = params[2].detach().clone()
    found["changed"] = str([name for name, param in model.named_parameters() if not torch.equal(param, before[name])])
    give(model, {**grads, "layers.1.weight": torch.full((7, 7), 9.0)})
    found["fails on an owner"] = raised(tz.whole(Failing, params, lr=0.1).step)
    give(model, grads)
    found["goes on"] = raised(optimizer.step)
    found |= misused_later(rank, model, params, optimizer)
    with model.no_sync():
        model(torch.ones(1, 7)).sum().backward()
    found["open"] = raised(optimizer.step)
    model.zero_grad()
    give(model, grads)
    found["elsewhere"] = raised(optimizer.step if rank == 0 else lambda: tz.full_state_dict(model))
    return found


LATER: dict[str, tuple[Any, Any]] = {  # options that ranks change after a step
    "later lr": (torch.tensor(0.01), torch.tensor(0.010000001)),
    "later eps": ((None, 1e-3), (None, 2e-3)),
    "later d": (1.0, 2.0),
}

EXPECTED = {
    "own groups": "OwnGroups makes 2 groups of the 1 that it was given, so tz.whole cannot tell their parameters apart",
    "copied": "tz.whole(Adafactor) cannot be copied or pickled, as it belongs to a model; save it with tz.save",
    "a state of nothing": "the state dict has a state 'k' that is of no parameter, which tz.whole cannot load",
    "by hand": "the parameters in the groups of tz.whole(Adafactor) were changed by hand; use add_param_group",
    "coupled later": "CoupledIfAsked couples parameters (beside other stand-ins ",
    "set": "tz.whole(CountsItself) cannot set 'count', which CountsItself has: each rank steps CountsItself on a part",
    "group before": "nothing",
    "group after": "steps of CountsItself change its 'count', which begins anew for parameters that are added after",
    "counts, and is trusted": "CountsWhereItSteps changes 'steps' of a group only where it has parameters of the group",
    "no empty group": "NeedsParameters cannot step groups without parameters (RuntimeError: stack expects a non-empty",
    "later lr": "'lr' of group 0 of Adafactor differs between ranks: rank 0 has 0.009999999776482582",
    "later eps": "'eps' of group 0 of Adafactor differs between ranks: rank 0 has (None, 0.001), rank 1 has (None, 0.",
    "later d": "'d' of group 0 of Adafactor differs between ranks: rank 0 has 1.0, rank 1 has 2.0",
    "of the class": "tz.whole(Counting) has no 'evaluate', which Counting has: it has what torch.optim.Optimizer has",
    "of none": "tz.whole has no attribute 'evaluate'; use those of torch.optim.Optimizer",
    "no model": "a parameter (of shape (2, 2)) that is not one of a sharded model's: take them from model.parameters()",
    "plain module": "(the plain module's 'layers.0.weight') that is not one of a sharded model's",
    "two models": "(Mlp); make one for each model",
    "not an optimizer": "which makes a list; give a class of torch.optim.Optimizer",
    "needs a closure": "LBFGS evaluates the loss several times in a step",
    "needs a loss": "a step of NeedsLoss needs the argument 'loss', and tz.whole has none to give",
    "an instance": "tz.whole was given a SGD to make optimizers with; give the class itself and then the parameters",
    "a list": "tz.whole was given a list to make optimizers with; give the class itself and then the parameters",
    "a model": "tz.whole was given a ZeroModule; give it model.parameters(), or some of them",
    "counts where it steps": "CountsWhereItSteps changes 'steps' of a group only where it has parameters of the group",
    "couples parameters": "Coupled couples parameters (beside other stand-ins ",
    "no matrix": "Muon only supports 2D parameters",
    "twice": "some parameters appear in more than one parameter group",
    "bad option": "Learning rate should be >= 0",
    "bad group": "(Mlp); make one for each model",
    "closure": "tz.whole(Adafactor).step was given a closure",
    "rates differ": "'lr' of group 0 of Adafactor differs between ranks: rank 0 has 0.01, rank 1 has 0.02",
    "a gradient on one rank": "parameter 'layers.1.weight' has a gradient on 1 of 2 ranks",
    "changed": "[]",
    "fails on an owner": "no step on a nine",
    "goes on": "nothing",
    "open": "Whole cannot step: no_sync still holds unreduced gradients",
    "elsewhere": "the ranks do different things: rank 0 is in step number",
}


def test_bad_uses_get_one_sentence_on_every_rank(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, misused):
        assert found.keys() == EXPECTED.keys()
        for name, told in found.items():
            assert EXPECTED[name] in told, (name, told)


class Strict(optim.Optimizer):
    """As the Muon of many scripts: takes groups of certain keys only, and steps parameters without a gradient, too."""

    def __init__(self, groups: Any) -> None:
        for group in groups:
            group["lr"] = group.get("lr", 0.1)
            assert group.keys() - {"param_names"} == {"params", "lr", "matrices"}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                past = self.state[param].setdefault("past", torch.zeros_like(param))
                past.lerp_(param.grad, 0.5)
                param.mul_(1 - 0.1 * group["lr"])
                param -= group["lr"] * past / (1 + past.norm() if group["matrices"] else 1)


def strict_steps(rank: int, world_size: int, stages: tuple[int, ...]) -> dict[int, list[str]]:
    """A scheduler adds to the groups; one parameter has no gradient in the first step, another one in the third."""
    found = {}
    for stage in stages:
        model, plain = sharded(fresh(Mlp), stage), fresh(Mlp)
        both = []
        for of, make in ((model, partial(tz.whole, Strict)), (plain, Strict)):
            params = list(of.parameters())
            groups = {matrices: [of for of in params if (of.ndim > 1) is matrices] for matrices in (True, False)}
            optimizer = make([{"params": members, "matrices": matrices} for matrices, members in groups.items()])
            both.append((optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)))
        for step in range(4):
            grads = gradients(plain, step)
            for name in {0: ("layers.1.weight",), 2: ("layers.0.bias", "layers.2.weight")}.get(step, ()):
                del grads[name]
            plain.zero_grad()
            model.zero_grad()
            for name, param in plain.named_parameters():
                param.grad = grads[name].clone() if name in grads else None
            give(model, grads)
            for optimizer, scheduler in both:
                optimizer.step()
                scheduler.step()
        found[stage] = differing(model, plain)
    return found


def test_constructors_take_their_own_keys_and_parameters_move_without_gradients(ranks_pool: RanksPool) -> None:
    for found in ranks_pool.run(2, strict_steps, of_tier((3,), (0, 1, 2, 3))):
        assert not any(found.values()), found


class Noisy(optim.SGD):
    """Draws random numbers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                param -= 0.1 * torch.rand_like(param) * param.grad


def drawn_by_copies(rank: int, world_size: int) -> list[str]:
    """One copy of two ranks, two copies of one, two of two: an optimizer that draws, and one that does not."""
    shapes = [(1, 2), (2, 1)] if world_size == 2 else [(2, 2)]
    found = []
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(stage=3, mesh=mesh)])
        found += [raised(partial(tz.whole, kind, model.parameters())) for kind in (Noisy, optim.Adafactor)]
    return found


def test_owners_in_several_copies_draw_no_random_numbers(ranks_pool: RanksPool) -> None:
    refused = "Noisy draws random numbers (step 1 was off by"
    for found in ranks_pool.run(2, drawn_by_copies):
        assert found[0] == found[1] == found[3] == "nothing"
        assert refused in found[2]
        assert "and the 2 copies of the model would draw other ones and drift apart" in found[2]


class Anchored(optim.SGD):
    """Pulls parameters to where they were when it was made, in ever smaller steps."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # torch's constructor calls this, too
        for param in self.param_groups[-1]["params"]:
            self.state[param] |= {"anchor": param.detach().clone(), "steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["steps"] += 1
                    pull = param.grad / param.grad.norm() + param - state["anchor"]
                    param -= group["lr"] / state["steps"] * pull


def made_without_gradients(rank: int, world_size: int) -> list[list[str]]:
    """Parameters that differ where some have no gradient in the first step; a group comes later. In two stages, torch
    asks for states before the first step."""
    found = []
    for stage in STAGES:
        model, plain = sharded(fresh(Mlp), tz.Policy(stage=stage, bucket_bytes=300)), fresh(Mlp)
        names = [name for name, _ in plain.named_parameters()]
        whole, ordinary = tz.whole(Anchored, named(model, names[:4])), Anchored(named(plain, names[:4]))
        if stage in (1, 3):
            anchors = get_optimizer_state_dict(model, whole, options=FULL)["state"]
            found.append(
                [name for name in names[:4] if not torch.equal(anchors[name]["anchor"], plain.get_parameter(name))]
            )
        for step in range(3):
            if step == 1:
                for optimizer, of in ((whole, model), (ordinary, plain)):
                    optimizer.add_param_group({"params": named(of, names[4:])})
            grads = gradients(plain, step)
            for name in (names[:1], names[4:5], [])[step]:
                grads.pop(name, None)
            step_both(model, plain, whole, ordinary, grads)
        found.append(differing(model, plain))
    return found


def test_an_optimizer_is_made_with_the_values_of_parameters_without_gradients(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, made_without_gradients) == [[[]] * 6] * 2


class Asking(optim.SGD):
    """Goes twice as far where a parameter is marked, and not at all where its name says so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param, name in zip(group["params"], group["param_names"], strict=True):
                if param.grad is not None and "1.bias" not in name:
                    param -= group["lr"] * (1 + getattr(param, "twice", False)) * param.grad / param.grad.norm()


def counted_in_place(rank: int, world_size: int) -> list[str]:
    """A tensor of a group that each step adds to, with several buckets."""
    plain = fresh(Mlp)
    model = sharded(plain, tz.Policy(stage=3, bucket_bytes=64))
    return steps_differ(model, plain, CoupledIfAsked, lr=0.1)


def test_each_bucket_steps_with_options_of_its_own(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, counted_in_place) == [[]] * 2


def marked_and_named(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for stage in (0, 1, 3):
        plain, other = fresh(Mlp), fresh(Mlp)
        for module in (plain, other):
            module.layers[0].weight.twice = True
        model = thunder.jit(other, transforms=[tz.ZeroTransform(stage=stage)])
        groups: list[Any] = [
            [{"params": pairs[:2]}, {"params": pairs[2:], "lr": 0.2}] for pairs in map(named_pairs, (model, plain))
        ]
        whole, ordinary = tz.whole(Asking, groups[0], lr=0.1), Asking(groups[1], lr=0.1)
        for step in range(3):
            for of in (model, plain):
                if step == 1:
                    of.get_parameter("layers.1.weight").twice = True
                elif step == 2:
                    del of.get_parameter("layers.1.weight").twice
            step_both(model, plain, whole, ordinary, gradients(plain, step))
        found.append((differing(model, plain), [name for name, param in named_pairs(model) if hasattr(param, "twice")]))
    return found


def named_pairs(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def test_owners_know_the_marks_and_names_of_parameters(ranks_pool: RanksPool) -> None:
    assert ranks_pool.run(2, marked_and_named) == [[([], ["layers.0.weight"])] * 3] * 2


PACKAGE = {"Shampoo": {"lr": 0.1}, "SOAP": {"lr": 0.01}, "Lamb": {"lr": 0.01}, "AdaFactor": {"lr": 0.01}}


def of_a_package(rank: int, world_size: int) -> dict[tuple[str, int], Any]:
    """How far the largest element is off after twenty steps, and how far it went."""
    import pytorch_optimizer

    found = {}
    for name, options in PACKAGE.items():
        for stage in STAGES:
            plain = fresh(Mlp)
            model, start = sharded(plain, tz.Policy(stage=stage, bucket_bytes=300)), fresh(Mlp).state_dict()
            steps_differ(model, plain, getattr(pytorch_optimizer, name), steps=20, **options)
            full = tz.full_state_dict(model)
            found[name, stage] = tuple(
                max(error(full[key], of[key].detach()) for key in full) for of in (plain.state_dict(), start)
            )
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_optimizers_of_a_package_are_those_of_one_process(ranks_pool: RanksPool, world_size: int) -> None:
    pytest.importorskip("pytorch_optimizer")
    for found in ranks_pool.run(world_size, of_a_package, timeout=200):
        for key, (off, moved) in found.items():
            assert off < 1e-5, (key, off)
            assert moved > 0.02, (key, moved)

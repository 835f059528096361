"""Models and optimizers of every kind in a checkpoint: what comes back exactly, and what is refused whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import thunder_zero as tz
from tests.harness.checkpoints import adamw, same, state_of, stepped
from tests.harness.errors import raised
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.checkpoint import folder, read_all
from thunder_zero.checkpoint.dcp_write import write_items
from thunder_zero.checkpoint.extras import extra_items
from thunder_zero.checkpoint.write import finish_checkpoint
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.state_dict.contents import ModelContents

Found = dict[str, Any]


class Momentum(torch.optim.Optimizer):
    """Keeps a float32 sum of gradients, whatever the parameter's dtype, and a count that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"scale": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            state = self.state[param]
            state["sum"] = state.get("sum", 0) + param.grad.float() / 3
            state["count"] = state.get("count", 0) + 1


class Picky(nn.Module):
    """Has a state of its own, a tensor, of which rank 1 does not take every value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.refused = nn.Linear(3, 3), torch.ones(2), -1.0
        self._register_state_dict_hook(add_version)  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        if state[0] == self.refused:
            raise ValueError(f"no scale of {self.refused}")
        self.scale = state


def add_version(module: nn.Module, found: dict[str, Any], prefix: str, local: object) -> None:
    found["version"] = 3


def weights(model: Any) -> dict[str, Tensor]:
    """Every tensor in full; what a hook adds is there, too, and none."""
    full = tz.full_state_dict(model)
    assert full.pop("version") == 3
    return full


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Stubborn:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        raise ValueError("stubborn")


def float32_states(rank: int, world_size: int, root: Path) -> Found:
    """Of bfloat16 parameters: after a load, and after one that was refused."""
    model = sharded(fresh(Mlp).bfloat16(), tz.Policy(stage=3, trust_optimizer=True))
    optimizer = Momentum(model.parameters())
    stepped(model, optimizer)
    saved = state_of(model, optimizer)
    tz.save(root / "float32", model, optimizer, extra={"stubborn": Stubborn()})
    stepped(model, optimizer)
    now = state_of(model, optimizer)
    told = raised(lambda: tz.load(root / "float32", model, optimizer, extra={"stubborn": Stubborn()}))
    refused = same(state_of(model, optimizer), now)
    tz.load(root / "float32", model, optimizer)
    return {
        "refused": (told.endswith("stubborn"), refused, bool(same(now, saved))),
        "loaded": same(state_of(model, optimizer), saved),
        "dtypes": {value.dtype for state in optimizer.state.values() for key, value in state.items() if key == "sum"},
    }


def several_optimizers(rank: int, world_size: int, root: Path) -> Found:
    def build(lr: float) -> tuple[Any, list[torch.optim.Optimizer]]:
        model = sharded(fresh(Mlp), 2)
        weights, biases = ([p for name, p in model.named_parameters() if kind in name] for kind in ("weight", "bias"))
        return model, [torch.optim.SGD(weights, lr, momentum=0.9), torch.optim.AdamW(biases, lr)]

    model, (first, second) = build(0.1)
    stepped(model, first)
    stepped(model, second)
    tz.save(root / "several", model, (first, second))
    other, (its_first, its_second) = build(0.7)
    its_first.param_groups[0]["name"] = "weights"
    torch.optim.lr_scheduler.ExponentialLR(its_second, 0.9)  # keeps initial_lr in the groups
    tz.load(root / "several", other, [its_first, its_second])
    return {
        "first": same(state_of(other, its_first), state_of(model, first)),
        "second": same(state_of(other, its_second), state_of(model, second)),
        "rates": [optimizer.param_groups[0]["lr"] for optimizer in (its_first, its_second)],
        "not saved": [its_first.param_groups[0]["name"], its_second.param_groups[0]["initial_lr"]],
        "in another order": raised(lambda: tz.load(root / "several", other, [its_second, its_first])),
    }


def own_state(rank: int, world_size: int, root: Path) -> Found:
    """A module's state that is a tensor; and one that rank 1 refuses."""
    model = sharded(fresh(Picky), 3)
    model._model.scale = torch.tensor([4.0, 5.0])
    tz.save(root / "state", model)
    full = weights(model)
    model._model.scale = torch.tensor([6.0, 7.0])
    with torch.no_grad():
        model.get_parameter("layer.weight").add_(1)
    before = weights(model)
    model._model.refused = 4.0 if rank == 1 else -1.0
    told = raised(lambda: tz.load(root / "state", model))
    changed = same(weights(model), before)
    model._model.refused = -1.0
    tz.load(root / "state", model)
    return {"told": told, "changed": changed, "loaded": same(weights(model), full)}


def ties(rank: int, world_size: int, root: Path) -> Found:
    apart = sharded(fresh(Tied, False), 3)
    tz.save(root / "apart", apart)
    with torch.no_grad():
        apart.get_parameter("head.weight").copy_(apart.get_parameter("embed.weight"))
    tz.save(root / "equal", apart)
    tied = sharded(fresh(Tied, True), 3)
    told = raised(lambda: tz.load(root / "apart", tied))
    return {"told": told, "equal": raised(lambda: tz.load(root / "equal", tied))}


def factored(rank: int, world_size: int, root: Path) -> Found:
    """Adafactor keeps one value for each row and each column: in full where parameters are."""
    model = sharded(fresh(Mlp), 0)
    optimizer = torch.optim.Adafactor(model.parameters())
    stepped(model, optimizer)
    tz.save(root / "factored", model, optimizer)
    again = sharded(fresh(Mlp), 0)
    its_optimizer = torch.optim.Adafactor(again.parameters())
    tz.load(root / "factored", again, its_optimizer)
    other = sharded(fresh(Mlp), 3)
    return {
        "as saved": same(state_of(again, its_optimizer), state_of(model, optimizer)),
        "sharded": raised(lambda: tz.load(root / "factored", other, torch.optim.Adafactor(other.parameters()))),
    }


def wrapped(rank: int, world_size: int, root: Path) -> Found:
    """torch's wrapper for activation checkpointing, which keeps its own name out of state dicts."""

    def build() -> Any:
        module = fresh(Mlp)
        module.layers[1] = checkpoint_wrapper(module.layers[1])
        return sharded(module, 3)

    model, plain = build(), sharded(fresh(Mlp), 2)
    optimizer, its_optimizer = adamw(model), adamw(plain, lr=1.0)
    stepped(model, optimizer)
    tz.save(root / "wrapped", model, optimizer)
    tz.load(root / "wrapped", plain, its_optimizer)
    full = tz.full_state_dict(model)
    return {
        "names": list(full) == list(fresh(Mlp).state_dict()),
        "loaded": same(tz.full_state_dict(plain), full),
        "optimizer": [its_optimizer.param_groups[0]["lr"], len(its_optimizer.state)],
        "back": raised(lambda: tz.load(root / "wrapped", model, optimizer)),
    }


def moving(rank: int, world_size: int, root: Path) -> Found:
    """Another job saves while this one loads: each rank would find another checkpoint, or a part of one."""
    model = sharded(fresh(Mlp), 3)
    for step in (1, 2):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        tz.save(root / f"step-{step}", model)
    read_model = read_all.read_model  # type: ignore[attr-defined]
    with mock.patch.object(folder, "locate", return_value=root / f"step-{1 + rank}"):
        tz.load(root / "latest", model)
    loaded = {float(value) for tensor in tz.full_state_dict(model).values() for value in tensor.flatten()}

    def slow(where: Path, *args: Any) -> Any:
        dist.barrier()
        if rank == 0:
            save_again(where, sharded_model(model).state.plan)
        dist.barrier()
        return read_model(where, *args)

    with mock.patch.object(read_all, "read_model", slow):
        told = raised(lambda: tz.load(root / "step-2", model))
    left = {float(value) for tensor in tz.full_state_dict(model).values() for value in tensor.flatten()}
    return {"loaded": loaded, "told": told, "left": left}


def save_again(path: Path, plan: tz.Plan) -> None:
    """As another job would, under the same name."""
    items = extra_items(ModelContents(plan, {}, {}, {}, {}, 0), {"a": 1})
    folder.prepare(path)
    finish_checkpoint(path, [write_items(folder.staging_of(path), 0, items)], None)


Case = tuple[Callable[[int, int, Path], Found], Found]
CASES: dict[str, Case] = {
    "float32 states of bfloat16": (
        float32_states,
        {"refused": (True, [], True), "loaded": [], "dtypes": {torch.float32}},
    ),
    "several optimizers": (
        several_optimizers,
        {
            "first": [],
            "second": [],
            "rates": [0.1, 0.1],
            "not saved": ["weights", 0.7],
            "in another order": "parameter group 0 of the checkpoint's",
        },
    ),
    "a module's own state": (own_state, {"told": "no scale of 4.0", "changed": [], "loaded": []}),
    "ties": (
        ties,
        {
            "told": "'embed.weight' and 'head.weight' are tied here, and differ in it; build the model",
            "equal": "nothing",
        },
    ),
    "factored": (factored, {"as saved": [], "sharded": "cannot be cut into rows: its shape is"}),
    "torch's wrapper": (wrapped, {"names": True, "loaded": [], "optimizer": [0.05, 6], "back": "nothing"}),
    "a checkpoint that moves": (
        moving,
        {"loaded": {1.0}, "told": "another save replaced or deleted", "left": {1.0}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_comes_back_exactly_or_is_refused(ranks_pool: RanksPool, tmp_path: Path, name: str) -> None:
    work, expected = CASES[name]
    for found in ranks_pool.run(2, work, tmp_path):
        assert found.keys() == expected.keys()
        for what, right in expected.items():
            told = isinstance(right, str) and right in found[what]
            assert told or found[what] == right, (what, found[what])

"""Whole states in checkpoints and state dicts: on any number of ranks, in any stage, with other owners, and by rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.rows import own_rows
from thunder_zero.runtime.sharded_model import sharded_model
from thunder_zero.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import thunder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FULL = StateDictOptions(full_state_dict=True)
SENT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OPTIONS: dict[str, dict[str, Any]] = {"Adafactor": {"lr": 0.05}, "AdamW": {"lr": 0.05}, "Listing": {"lr": 0.05}}


class Listing(optim.Optimizer):
    """Keeps a list of factors, as Shampoo does, in float64 for parameters of any dtype."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    grad = param.grad.double().view(len(param), -1)
                    factors = self.state[param].setdefault("factors", [0.0, 0.0])
                    both = (grad @ grad.T, grad.T @ grad)
                    self.state[param]["factors"] = [was + now for was, now in zip(factors, both, strict=True)]
                    param -= group["lr"] * param.grad / (1 + sum(of.norm() for of in both))


KINDS: dict[str, Any] = {"Adafactor": optim.Adafactor, "AdamW": optim.AdamW, "Listing": Listing}


def stepped(model: Any, optimizer: optim.Optimizer, first: int, steps: int = 2) -> None:
    state = sharded_model(model).state
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for path, shard in state.shards.items():
            param = state.plan.by_name[path]
            shard.grad = own_rows(torch.randn(param.shape, generator=generator), param, state.plan).clone()
        optimizer.step()


def plain_of(name: str) -> tuple[nn.Module, optim.Optimizer]:
    plain = fresh(Mlp)
    return plain, KINDS[name](plain.parameters(), **OPTIONS[name])


def plain_stepped(plain: nn.Module, optimizer: optim.Optimizer, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for param in plain.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


def whole_of(model: Any, name: str) -> Any:
    return tz.whole(KINDS[name], model.parameters(), **OPTIONS[name])


def differ(model: Any, plain: nn.Module) -> list[str]:
    full = tz.full_state_dict(model)
    return [name for name, value in plain.state_dict().items() if not torch.equal(full[name], value)]


def save_all(rank: int, world_size: int, root: Path) -> dict[str, int]:
    """A checkpoint of each kind after two steps; AdamW also by rows. The states' elements here."""
    found = {}
    for name in KINDS:
        model = sharded(fresh(Mlp), 3)
        optimizer = whole_of(model, name)
        stepped(model, optimizer, 0)
        tz.save(root / name, model, optimizer)
        values = [value for state in optimizer.state.values() for value in state.values()]
        found[name] = sum(value.numel() for value in values if isinstance(value, Tensor))
    model = sharded(fresh(Mlp), 2)
    rows = optim.AdamW(model.parameters(), **OPTIONS["AdamW"])
    stepped(model, rows, 0)
    tz.save(root / "rows", model, rows)
    return found


def load_all(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Loads each, steps twice, and compares with four steps of one process, bit for bit."""
    found: dict[str, Any] = {}
    cases = [(name, name, stage) for name in KINDS for stage in (0, 1, 3)] + [("rows", "AdamW", 3)]
    for folder, name, stage in cases:
        model = sharded(Mlp(), stage)
        optimizer = whole_of(model, name)
        tz.load(root / folder, model, optimizer)
        stepped(model, optimizer, 2)
        plain, ordinary = plain_of(name)
        plain_stepped(plain, ordinary, 0, 4)
        found[f"{folder} in stage {stage}"] = differ(model, plain)
    model = sharded(Mlp(), 3)
    rows = optim.AdamW(model.parameters(), **OPTIONS["AdamW"])
    tz.load(root / "AdamW", model, rows)
    stepped(model, rows, 2)
    plain, ordinary = plain_of("AdamW")
    plain_stepped(plain, ordinary, 0, 4)
    full = tz.full_state_dict(model)
    close = [torch.allclose(full[name], value, atol=1e-6) for name, value in plain.state_dict().items()]
    found["whole to rows"] = [] if all(close) else ["not close"]
    by_rows = tz.zero(thunder.jit(fresh(Mlp)), stage=3, trust_optimizer=True)
    told = raised(lambda: tz.load(root / "Adafactor", by_rows, optim.Adafactor(by_rows.parameters(), lr=0.05)))
    found["told"] = told
    found["other kind"] = raised(lambda: tz.load(root / "Adafactor", model, whole_of(model, "AdamW")))
    return found


def test_a_checkpoint_loads_at_any_world_and_stage_and_by_rows(ranks_pool: RanksPool, tmp_path: Path) -> None:
    saved = ranks_pool.run(2, save_all, tmp_path)
    assert all(min(found[name] for found in saved) > 0 for name in ("Adafactor", "AdamW"))
    for world_size in (1, 2, 3):
        for found in ranks_pool.run(world_size, load_all, tmp_path, timeout=110):
            told, other = found.pop("told"), found.pop("other kind")
            if world_size > 1:
                assert "cannot be cut into rows" in told, told
                assert "load it into an optimizer made by tz.whole" in told, told
            assert "the checkpoint's optimizer is Adafactor, this one is AdamW" in other, other
            assert {name: names for name, names in found.items() if names} == {}


def test_whole_states_are_one_chunk_and_consolidate(ranks_pool: RanksPool, tmp_path: Path) -> None:
    ranks_pool.run(2, save_all, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path / "Adafactor").read_metadata()
    state = {key: of for key, of in metadata.state_dict_metadata.items() if key.startswith("optim.state.")}
    tensors = [of for of in state.values() if hasattr(of, "chunks")]
    assert {len(of.chunks) for of in tensors} == {1}
    for name in KINDS:
        tz.consolidate(tmp_path / name, tmp_path / f"{name}.pt", optimizer=True)
        read = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        plain, ordinary = plain_of(name)
        plain_stepped(plain, ordinary, 0)
        names = [path for path, _ in plain.named_parameters()]
        right = {names[number]: of for number, of in ordinary.state_dict()["state"].items()}
        assert read["optim"]["state"].keys() == right.keys()
        for path, values in right.items():
            for key, value in values.items():
                found = read["optim"]["state"][path][key]
                pairs = zip(found, value, strict=True) if isinstance(value, list) else [(found, value)]
                for one, other in pairs:
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other), (name, path, key)
    tz.consolidate(tmp_path / "Adafactor", tmp_path / "a.safetensors", optimizer=True)
    assert (tmp_path / "a.optimizer.safetensors").exists()


def state_dicts(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    copies = (world_size // 2, 2) if world_size == 4 else (1, world_size)
    mesh = init_device_mesh("cpu", copies, mesh_dim_names=("replicate", "shard"))
    for name in KINDS:
        model = thunder.jit(fresh(Mlp), transforms=[tz.ZeroTransform(stage=3, mesh=mesh)])
        optimizer = whole_of(model, name)
        stepped(model, optimizer, 0)
        full = get_optimizer_state_dict(model, optimizer, options=FULL)
        by_rows = get_optimizer_state_dict(model, optimizer)
        plain, ordinary = plain_of(name)
        plain_stepped(plain, ordinary, 0)
        names = [path for path, _ in plain.named_parameters()]
        right = {names[number]: of for number, of in ordinary.state_dict()["state"].items()}
        found[f"{name} full"] = unlike(full["state"], right)
        if name == "AdamW":
            dtensors = [of["exp_avg"] for of in by_rows["state"].values()]
            found["DTensors"] = [path for path, of in enumerate(dtensors) if not isinstance(of, DTensor)]
        for way, given, options in (
            ("full", full, FULL),
            ("by rows", by_rows, StateDictOptions()),
            (
                "from rank 0",
                full if rank == 0 else {},
                StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
            ),
        ):
            other = sharded(fresh(Mlp), 2)
            other.load_original_state_dict(tz.full_state_dict(model))
            its = whole_of(other, name)
            set_optimizer_state_dict(other, its, given, options=options)
            stepped(other, its, 2)
            again, its_ordinary = plain_of(name)
            plain_stepped(again, its_ordinary, 0, 4)
            found[f"{name} loaded {way}"] = differ(other, again)
    model = sharded(fresh(Mlp), 3)
    optimizer = whole_of(model, "Adafactor")
    made = get_optimizer_state_dict(model, optimizer, options=FULL)
    found["made"] = [path for path, of in made["state"].items() if "step" not in of]
    found["unmoved"] = differ(model, fresh(Mlp))
    return found


def unlike(found: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The states that differ in keys, dtypes or bits."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(other, list):
            return all(map(same, one, other))
        return one.dtype == other.dtype and torch.equal(one, other)

    if found.keys() != right.keys():
        return ["names"]
    return [
        f"{path} {key}"
        for path, of in right.items()
        for key, value in of.items()
        if key not in found[path] or not same(found[path][key], value)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_state_dicts_have_whole_states_on_every_rank(ranks_pool: RanksPool, world_size: int) -> None:
    for found in ranks_pool.run(world_size, state_dicts, timeout=110):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


def refused_alike(rank: int, world_size: int, root: Path) -> dict[str, str]:
    """A state that one owner cannot save."""
    model = sharded(fresh(Mlp), 3)
    optimizer = whole_of(model, "Adafactor")
    stepped(model, optimizer, 0)
    if rank == 1:
        next(iter(optimizer.state.values()))["thing"] = object()
    return {"odd state": raised(lambda: tz.save(root / "odd", model, optimizer))}


def test_what_an_owner_cannot_save_is_refused_on_every_rank(ranks_pool: RanksPool, tmp_path: Path) -> None:
    first, second = ranks_pool.run(2, refused_alike, tmp_path)
    assert "rank 1 refused to save, so every rank stops" in first["odd state"], first
    assert "cannot save the optimizer's state 'thing' of parameter 'layers." in second["odd state"], second

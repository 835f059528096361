"""Checkpoints of ``tz.whole`` load on any number of ranks, in any stage, with other owners, and as rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import thunder_zero as tz
from tests.harness.errors import fails
from tests.harness.models import Mlp, fresh, sharded
from tests.harness.ranks import RanksPool
from tests.harness.tiers import slow
from tests.harness.whole_steps import make_gradients, set_gradients

BEFORE, AFTER = range(2), range(2, 4)  # steps
RATE = 0.05


class Listing(optim.Optimizer):
    """An optimizer with a list of float64 factors in its state, as Shampoo has, for parameters of any dtype."""

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
                    param -= group["lr"] * param.grad / sum(factor.norm() for factor in both)


KINDS: dict[str, Any] = {"Adafactor": optim.Adafactor, "AdamW": optim.AdamW, "Listing": Listing}


def make_whole(model: Any, name: str) -> Any:
    return tz.whole(KINDS[name], model.parameters(), lr=RATE)


def take_steps(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        set_gradients(model, make_gradients(fresh(Mlp), step))
        optimizer.step()


def train_one_process(name: str, steps: int) -> tuple[nn.Module, dict[str, Any]]:
    """Train a plain module; return it, and its optimizer's state by the names of parameters."""
    plain = fresh(Mlp)
    optimizer = KINDS[name](plain.parameters(), lr=RATE)
    for step in range(steps):
        grads = make_gradients(plain, step)
        for path, param in plain.named_parameters():
            param.grad = grads.get(path)
        optimizer.step()
    return plain, {path: optimizer.state[param] for path, param in plain.named_parameters()}


def assert_same(actual: Any, expected: Any, path: str) -> None:
    """Check that dtypes and bits are equal, also inside dicts and lists."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, atol=0, rtol=0, msg=lambda text: f"{path}: {text}")
    elif isinstance(expected, list):
        for index, (item, expected_item) in enumerate(zip(actual, expected, strict=True)):
            assert_same(item, expected_item, f"{path}[{index}]")
    else:
        assert actual.keys() == expected.keys(), (path, actual.keys())
        for key, value in expected.items():
            assert_same(actual[key], value, f"{path} {key}")


def assert_resumes(model: Any, optimizer: Any, name: str) -> None:
    """Check that further steps end where an uninterrupted run of one process ends."""
    take_steps(model, optimizer, AFTER)
    assert_same(tz.full_state_dict(model), dict(train_one_process(name, 4)[0].state_dict()), name)


# Checkpoints


def save_all(rank: int, world_size: int, root: Path) -> None:
    """Save a checkpoint of each kind after two steps, AdamW also as rows. If an owner cannot save, all refuse."""
    for name in KINDS:
        model = sharded(fresh(Mlp), 3)
        optimizer = make_whole(model, name)
        take_steps(model, optimizer, BEFORE)
        assert optimizer.state, name
        tz.save(root / name, model, optimizer)
    if rank == 1:
        next(iter(optimizer.state.values()))["thing"] = object()
    message = ("rank 1 refused to save", "cannot save the optimizer's state 'thing' of parameter 'layers.")[rank]
    fails(lambda: tz.save(root / "odd", model, optimizer), message)
    model = sharded(fresh(Mlp), 2)
    rows = optim.AdamW(model.parameters(), lr=RATE)
    take_steps(model, rows, BEFORE)
    tz.save(root / "rows", model, rows)


@pytest.fixture(scope="module")
def root(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    ranks_pool.run(2, save_all, path)
    return path


def load_all(rank: int, world_size: int, root: Path) -> None:
    loads: list[tuple[str, str, int | tz.Policy]] = [
        ("Adafactor", "Adafactor", 1),
        ("Listing", "Listing", 0),
        ("AdamW", "AdamW", 3),
        ("AdamW", "AdamW", tz.Policy(2, owned=("*.weight",))),
        ("rows", "AdamW", 3),
    ]
    for folder, name, policy in loads:
        model = sharded(Mlp(), policy)
        optimizer = make_whole(model, name)
        tz.load(root / folder, model, optimizer)
        assert_resumes(model, optimizer, name)
    fails(lambda: tz.load(root / "Adafactor", model, optimizer), "the checkpoint's optimizer is Adafactor, this one is")
    by_rows = sharded(Mlp(), tz.Policy(stage=3))
    rows = optim.AdamW(by_rows.parameters(), lr=RATE)
    tz.load(root / "AdamW", by_rows, rows)
    take_steps(by_rows, rows, AFTER)
    full = tz.full_state_dict(by_rows)
    for name, value in train_one_process("AdamW", 4)[0].state_dict().items():
        torch.testing.assert_close(full[name], value, atol=1e-6, rtol=0)
    if world_size > 1:
        rows_of_factors = optim.Adafactor(by_rows.parameters(), lr=RATE)
        words = "cannot be cut into rows", "load it into an optimizer made by tz.whole"
        fails(lambda: tz.load(root / "Adafactor", by_rows, rows_of_factors), *words)


@pytest.mark.parametrize("world_size", [3, *slow(1)])
def test_a_checkpoint_loads_at_any_world_and_stage_and_by_rows(
    ranks_pool: RanksPool, root: Path, world_size: int
) -> None:
    ranks_pool.run(world_size, load_all, root)


def test_whole_states_are_one_chunk_and_consolidate(root: Path, tmp_path: Path) -> None:
    metadata = dcp.FileSystemReader(root / "Adafactor").read_metadata()
    states = [entry for key, entry in metadata.state_dict_metadata.items() if key.startswith("optim.state.")]
    assert {len(entry.chunks) for entry in states if hasattr(entry, "chunks")} == {1}
    for name in KINDS:
        dcp_to_torch_save(root / name, tmp_path / f"{name}.pt")
        file = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert_same(file["optim"]["state"], train_one_process(name, 2)[1], name)
    tz.tools.consolidate(root / "Adafactor", tmp_path / "a.safetensors", optimizer=True)
    assert (tmp_path / "a.optimizer.safetensors").exists()

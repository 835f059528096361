"""Checkpoints to single files and back, without a process group: values, names, ties, dtypes, and how much at once."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

import thunder_zero as tz
from tests.harness.ranks import RanksPool
from tests.ranks.models import Small, fresh, raised, sharded
from thunder_zero import cli
from thunder_zero.runtime.consolidate import Checkpoint

WORLD, STEPS = 3, 2
TOKENS = torch.arange(6).view(2, 3)


def saved(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trains and saves; the full weights, and the first moments of this rank's rows."""
    model = sharded(fresh(Small), 3)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(TOKENS).square().mean().backward()
        optimizer.step()
    tz.save(folder / "step-2", model, optimizer)
    moments = {
        name: optimizer.state[param]["exp_avg"] for name, param in model.named_parameters() if param in optimizer.state
    }
    return tz.full_state_dict(model), moments


def loaded(rank: int, world_size: int, path: Path) -> dict[str, Tensor]:
    model = sharded(fresh(Small), 2)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    tz.load(path, model)
    return tz.full_state_dict(model)


@pytest.fixture(scope="module")
def run(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], Any]:
    folder = tmp_path_factory.mktemp("runs")
    results = ranks_pool.run(WORLD, saved, folder)
    return folder / "step-2", results[0][0], [moments for _, moments in results]


def moment(run: Any, name: str) -> Tensor:
    """Of a parameter's first moments the rows of all ranks."""
    weight = run[1][name]
    return torch.cat([moments[name] for moments in run[2]])[: len(weight)]


def test_a_safetensors_file_has_every_tensor_once(run: Any, tmp_path: Path) -> None:
    path, weights, _ = run
    assert tz.consolidate(path, tmp_path / "model.safetensors") == (tmp_path / "model.safetensors",)
    tensors = load_file(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stream:
        aliases = json.loads(stream.metadata()["aliases"])
    assert aliases == {"head.weight": "embed.weight"}
    assert {*tensors, *aliases} == set(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors.items())
    (half,) = tz.consolidate(path.parent / "latest", tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert all(torch.equal(tensor, weights[name].bfloat16()) for name, tensor in load_file(half).items())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["half.safetensors", "model.safetensors"]


def test_large_ones_are_cut_into_files_with_an_index(run: Any, tmp_path: Path) -> None:
    path, weights, _ = run
    *files, index = tz.consolidate(path, tmp_path / "model.safetensors", max_file_bytes=130)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    where = json.loads(index.read_text())
    assert index.name == "model.safetensors.index.json"
    parts = {file.name: load_file(file) for file in files}
    assert len(parts) > 2
    for name, part in parts.items():
        assert sum(tensor.nbytes for tensor in part.values()) <= 130 or len(part) == 1
        assert {key for key, file in where["weight_map"].items() if file == name} == set(part)
        assert all(torch.equal(tensor, weights[key]) for key, tensor in part.items())
    assert where["metadata"]["total_size"] == sum(tensor.nbytes for part in parts.values() for tensor in part.values())


def test_the_optimizer_stands_beside(run: Any, tmp_path: Path) -> None:
    *_, beside = tz.consolidate(run[0], tmp_path / "model.safetensors", optimizer=True)
    assert beside.name == "model.optimizer.safetensors"
    states = load_file(beside)
    for name in run[2][0]:
        if name not in ("scale",):
            assert torch.equal(states[f"{name}.exp_avg"], moment(run, name)), name
        assert states[f"{name}.step"] == STEPS
    with safe_open(beside, framework="pt") as stream:
        groups = json.loads(stream.metadata()["param_groups"])
    assert groups["0.lr"] == 0.1
    assert set(run[2][0]) <= set(groups["0.params"])


def test_a_torch_file_loads_into_the_plain_module(run: Any, tmp_path: Path) -> None:
    path, weights, _ = run
    (file,) = tz.consolidate(path, tmp_path / "model.pt")
    state = torch.load(file, weights_only=True)
    assert list(state) == list(weights) or set(state) == set(weights)
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert fresh(Small).load_state_dict(state) is not None
    (both,) = tz.consolidate(path, tmp_path / "both.pt", optimizer=True)
    state = torch.load(both, weights_only=True)
    assert all(torch.equal(state["model"][name], weight) for name, weight in weights.items())
    assert torch.equal(state["optim"]["state"]["layers.0.weight"]["exp_avg"], moment(run, "layers.0.weight"))
    assert state["optim"]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_one_tensor_is_there_at_a_time(run: Any, tmp_path: Path, name: str) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = Checkpoint.read

    def watched(self: Checkpoint, key: str, dtype: torch.dtype) -> Tensor:
        nonlocal most
        most = max(most, sum(seen() is not None for seen in alive))
        value = read(self, key, dtype)
        alive.append(weakref.ref(value))
        return value

    with mock.patch.object(Checkpoint, "read", watched):
        tz.consolidate(run[0], tmp_path / name)
    assert len(alive) > 5
    assert most <= 1


def test_the_other_way(run: Any, ranks_pool: RanksPool, tmp_path: Path) -> None:
    (file,) = tz.consolidate(run[0], tmp_path / "model.safetensors")
    assert tz.shard_safetensors(file, tmp_path / "start", ranks=4) == tmp_path / "start"
    for weights in ranks_pool.run(2, loaded, tmp_path / "start"):
        assert all(torch.equal(weights[name], weight) for name, weight in run[1].items())


def test_the_command_line(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run[0]
    assert cli.main(["inspect", str(path.parent / "latest")]) == 0
    printed = capsys.readouterr().out
    assert "embed.weight" in printed
    assert "9 x 5" in printed
    assert "saved by 3 ranks" in printed
    assert "at step 2" in printed
    assert (
        cli.main(["consolidate", str(path), str(tmp_path / "m.safetensors"), "--dtype", "float16", "--optimizer"]) == 0
    )
    assert str(tmp_path / "m.optimizer.safetensors") in capsys.readouterr().out
    assert load_file(tmp_path / "m.safetensors")["row"].dtype is torch.float16
    assert cli.main(["shard", str(tmp_path / "m.safetensors"), str(tmp_path / "s"), "--ranks", "2"]) == 0
    assert cli.main(["inspect", str(tmp_path / "none")]) == 1
    assert "thunder-zero: there is no checkpoint at" in capsys.readouterr().err


def test_what_is_refused(run: Any, tmp_path: Path) -> None:
    path = run[0]
    assert "model.txt ends in '.txt'; give a name that ends in .safetensors or .pt" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.txt")
    )
    assert "max_file_bytes is 5; give 1 or more, and a name" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.pt", max_file_bytes=5)
    )
    assert "dtype is torch.int8; give a floating-point dtype" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.pt", dtype=torch.int8)
    )
    assert "ranks is 0; give the number of files" in raised(
        lambda: tz.shard_safetensors(tmp_path / "no", tmp_path / "no", ranks=0)
    )
    tz.consolidate(path, tmp_path / "model.safetensors")
    bare = tz.shard_safetensors(tmp_path / "model.safetensors", tmp_path / "bare")
    assert "has no optimizer; consolidate it without one" in raised(
        lambda: tz.consolidate(bare, tmp_path / "again.pt", optimizer=True)
    )
    data = next(file for file in bare.iterdir() if file.suffix == ".distcp")
    flipped = bytearray(data.read_bytes())
    flipped[-1] ^= 1
    data.write_bytes(flipped)
    assert f"is damaged: {data.name} was changed" in raised(lambda: tz.consolidate(bare, tmp_path / "again.pt"))
    assert not (tmp_path / "again.pt").exists()

"""Checkpoints to single files and back, without a process group: values, names, ties, dtypes, and how much at once."""

from __future__ import annotations

import json
import shutil
import weakref
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import thunder_zero as tz
from tests.harness.errors import raised
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero import cli
from thunder_zero.convert.open_checkpoint import OpenCheckpoint

WORLD, STEPS = 3, 2
TOKENS = torch.arange(6).view(2, 3)


class Odd(nn.Module):
    """Has a state of its own with a tensor in it, and a parameter for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.own = nn.Linear(3, 3, bias=False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": [torch.arange(3), "three"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.layer(x))


class Counting(torch.optim.SGD):
    """Counts its steps in Python."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.state:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1


def save_odd(folder: Path) -> None:
    model = sharded(fresh(Odd), tz.Policy(stage=2, ignored=("own",), trust_optimizer=True))
    optimizer = Counting(model.parameters(), 0.1, momentum=0.9)
    for _ in range(STEPS):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    tz.save(folder / "odd", model, optimizer)


def saved(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trains and saves; the full weights, and the first moments of this rank's rows."""
    save_odd(folder)
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


def test_the_optimizer_has_a_file_of_its_own(run: Any, tmp_path: Path) -> None:
    *_, of_optimizer = tz.consolidate(run[0], tmp_path / "model.safetensors", optimizer=True)
    assert of_optimizer.name == "model.optimizer.safetensors"
    states = load_file(of_optimizer)
    for name in run[2][0]:
        if name not in ("scale",):
            assert torch.equal(states[f"{name}.exp_avg"], moment(run, name)), name
        assert states[f"{name}.step"] == STEPS
    with safe_open(of_optimizer, framework="pt") as stream:
        groups = json.loads(stream.metadata()["param_groups"])
    assert groups["0.lr"] == 0.1
    assert set(run[2][0]) <= set(groups["0.params"])


def test_a_torch_file_loads_into_the_plain_module(run: Any, tmp_path: Path) -> None:
    path, weights, _ = run
    (file,) = tz.consolidate(path, tmp_path / "model.pt")
    state = torch.load(file, weights_only=True)
    assert set(state) == set(weights)
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert zipfile.ZipFile(file).testzip() is None  # which compares CRCs
    assert all(torch.equal(torch.load(file, mmap=True)[name], weight) for name, weight in weights.items())
    module = Small()
    module.load_state_dict(state)
    assert torch.equal(module.head.weight, weights["embed.weight"])
    (both,) = tz.consolidate(path, tmp_path / "both.pt", optimizer=True)
    state = torch.load(both, weights_only=True)
    assert all(torch.equal(state["model"][name], weight) for name, weight in weights.items())
    assert torch.equal(state["optim"]["state"]["layers.0.weight"]["exp_avg"], moment(run, "layers.0.weight"))
    assert state["optim"]["param_groups"][0]["lr"] == 0.1


def test_nothing_is_lost_without_a_word(run: Any, tmp_path: Path) -> None:
    odd = run[0].parent / "odd"
    omission = "does not contain the ranks' own values of ignored parameters: model.own.weight"
    with pytest.warns(UserWarning, match="does not contain") as warned:
        (file,) = tz.consolidate(odd, tmp_path / "odd.pt", optimizer=True)
    assert [str(warning.message).partition(";")[0] for warning in warned] == [
        f"odd.pt {omission}, optim.state.own.weight.momentum_buffer, optim.state.own.weight.step"
    ]
    state = torch.load(file, weights_only=True)
    seen, three = state["model"]["_extra_state"]["seen"]
    assert (seen.tolist(), three) == ([0, 1, 2], "three")
    kept = state["optim"]["state"]["layer.weight"]
    assert kept["step"] == STEPS
    assert kept["momentum_buffer"].shape == (3, 3)
    with pytest.warns(UserWarning, match="does not contain") as warned:
        *_, of_optimizer = tz.consolidate(odd, tmp_path / "odd.safetensors", optimizer=True)
    assert [str(warning.message).partition(";")[0] for warning in warned][1:] == [
        "odd.safetensors does not contain _extra_state: safetensors files cannot hold extra states"
    ]
    with safe_open(of_optimizer, framework="pt") as stream:
        assert json.loads(stream.metadata()["state"]) == {"layer.weight.step": STEPS, "layer.bias.step": STEPS}
    with pytest.warns(UserWarning, match=f"odd.pt {omission};"):
        tz.consolidate(odd, tmp_path / "odd.pt")


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_one_tensor_is_there_at_a_time(run: Any, tmp_path: Path, name: str) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = OpenCheckpoint.read

    def watched(self: OpenCheckpoint, key: str, dtype: torch.dtype) -> Tensor:
        nonlocal most
        most = max(most, sum(seen() is not None for seen in alive))
        value = read(self, key, dtype)
        alive.append(weakref.ref(value))
        return value

    with mock.patch.object(OpenCheckpoint, "read", watched):
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
    assert cli.main(["inspect", str(path.parent / "latest"), "--verify"]) == 0
    rows = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert {"embed.weight 9 x 5 float32 180", "head.weight = embed.weight", "scale - float32 4"} <= set(rows)
    printed = " ".join(rows)
    states = 3 * len(run[2][0])  # AdamW has three
    assert f"step-2: saved by 3 ranks; {states} tensors of an optimizer at step 2; 4 files" in printed
    of_model = sum(tensor.nbytes for name, tensor in run[1].items() if name != "head.weight")
    of_states = sum(2 * run[1][name].nbytes + 4 for name in run[2][0])
    assert f"its tensors have {of_model + of_states:,} B" in printed
    assert cli.main(["inspect", str(path.parent / "odd")]) == 0
    assert "2 tensors of an optimizer at step 2; 9 values of single ranks" in capsys.readouterr().out
    out = tmp_path / "m.safetensors"
    assert cli.main(["consolidate", str(path), str(out), "--dtype", "float16", "--optimizer"]) == 0
    assert str(tmp_path / "m.optimizer.safetensors") in capsys.readouterr().out
    assert load_file(out)["row"].dtype is torch.float16
    assert cli.main(["consolidate", str(path.parent / "odd"), str(tmp_path / "odd.pt")]) == 0
    assert "thunder-zero: odd.pt does not contain the ranks' own values" in capsys.readouterr().err
    (tmp_path / "cut").mkdir()
    for file in (".metadata", "manifest.json"):
        shutil.copy(path / file, tmp_path / "cut")
    assert cli.main(["inspect", str(tmp_path / "cut")]) == 1
    last = capsys.readouterr()
    assert f"cut: saved by 3 ranks; {states} tensors of an optimizer; 4 files" in last.out
    assert ".distcp is missing" in last.err


def test_what_is_refused(run: Any, tmp_path: Path) -> None:
    path = run[0]
    assert "model.txt ends in '.txt'; pass a name that ends in .safetensors or .pt" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.txt")
    )
    assert "max_file_bytes is 5; pass 1 or more, and a name" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.pt", max_file_bytes=5)
    )
    assert "dtype is torch.int8; pass a floating-point dtype" in raised(
        lambda: tz.consolidate(path, tmp_path / "model.pt", dtype=torch.int8)
    )
    assert "ranks is 0; pass the number of files" in raised(
        lambda: tz.shard_safetensors(tmp_path / "no", tmp_path / "no", ranks=0)
    )
    tz.consolidate(path, tmp_path / "model.safetensors")
    bare = tz.shard_safetensors(tmp_path / "model.safetensors", tmp_path / "bare")
    assert "has no optimizer; consolidate without one" in raised(
        lambda: tz.consolidate(bare, tmp_path / "again.pt", optimizer=True)
    )
    data = next(file for file in bare.iterdir() if file.suffix == ".distcp")
    flipped = bytearray(data.read_bytes())
    flipped[-1] ^= 1
    data.write_bytes(flipped)
    assert f"is damaged: {data.name} was changed: its SHA-256 differs; use another" in raised(
        lambda: tz.consolidate(bare, tmp_path / "again.pt")
    )
    assert not (tmp_path / "again.pt").exists()

"""Checkpoints become single files and come back with equal values, names, ties and dtypes, a tensor at a time."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import thunder_zero as tz
from tests.harness.checkpoints import adamw, differing, state_of, take_step
from tests.harness.commands import output_of, refusal_of, run_command
from tests.harness.errors import fails
from tests.harness.models import Small, fresh, sharded
from tests.harness.ranks import RanksPool
from thunder_zero.tools.convert import OpenCheckpoint

STEPS = 2


class Odd(nn.Module):
    """A model with an extra state that has a tensor, and with a parameter that ranks do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.own = nn.Linear(3, 3, bias=False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": [torch.arange(3), "three"]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state


class Counting(torch.optim.SGD):
    """SGD that counts its steps in Python numbers."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.state:
            self.state[param]["step"] = self.state[param].get("step", 0) + 1


@dataclass
class Run:
    """A folder of the checkpoints ``odd`` and ``step-2``, and full weights and AdamW states of ``step-2``."""

    folder: Path
    weights: dict[str, Tensor]
    states: dict[str, Tensor]

    @property
    def path(self) -> Path:
        return self.folder / "step-2"


def save(rank: int, world_size: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    odd = sharded(fresh(Odd), tz.Policy(stage=2, ignored=("own",)))
    counting = Counting(odd.parameters(), 0.1, momentum=0.9)
    model = sharded(fresh(Small), 3)
    optimizer = adamw(model, lr=0.1)
    for _ in range(STEPS):
        take_step(odd, counting)
        take_step(model, optimizer)
    tz.save(folder / "odd", odd, counting)
    tz.save(folder / "step-2", model, optimizer)
    weights = tz.full_state_dict(model)
    states = {name.replace(" ", "."): value for name, value in state_of(model, optimizer).items() if " " in name}
    return weights, states


@pytest.fixture(scope="module")
def run(ranks_pool: RanksPool, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    return Run(folder, *ranks_pool.run(3, save, folder)[0])


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as stream:
        return stream.metadata()


def test_a_safetensors_file_has_every_tensor_once(run: Run, tmp_path: Path) -> None:
    assert tz.tools.consolidate(run.path, tmp_path / "model.safetensors") == (tmp_path / "model.safetensors",)
    aliases = json.loads(metadata_of(tmp_path / "model.safetensors")["aliases"])
    assert aliases == {"head.weight": "embed.weight"}
    once = {name: weight for name, weight in run.weights.items() if name not in aliases}
    assert differing(load_file(tmp_path / "model.safetensors"), once) == []
    (half,) = tz.tools.consolidate(run.folder / "latest", tmp_path / "half.safetensors", dtype=torch.bfloat16)
    assert differing(load_file(half), {name: weight.bfloat16() for name, weight in once.items()}) == []
    assert sorted(file.name for file in tmp_path.iterdir()) == ["half.safetensors", "model.safetensors"]


def test_large_models_are_cut_into_files_with_an_index(run: Run, tmp_path: Path) -> None:
    *files, index = tz.tools.consolidate(run.path, tmp_path / "model.safetensors", max_file_bytes=130)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    listed = json.loads(index.read_text())
    assert index.name == "model.safetensors.index.json"
    parts = {file.name: load_file(file) for file in files}
    assert len(parts) > 2
    assert listed["weight_map"] == {key: name for name, part in parts.items() for key in part}
    for part in parts.values():
        assert sum(tensor.nbytes for tensor in part.values()) <= 130 or len(part) == 1
        assert all(torch.equal(tensor, run.weights[key]) for key, tensor in part.items())
    assert listed["metadata"]["total_size"] == sum(tensor.nbytes for part in parts.values() for tensor in part.values())


def test_the_optimizer_has_a_file_of_its_own(run: Run, tmp_path: Path) -> None:
    *_, optimizer_file = tz.tools.consolidate(run.path, tmp_path / "model.safetensors", optimizer=True)
    assert optimizer_file.name == "model.optimizer.safetensors"
    assert differing(load_file(optimizer_file), run.states) == []
    groups = json.loads(metadata_of(optimizer_file)["param_groups"])
    assert groups["0.lr"] == 0.1
    assert {name.rpartition(".")[0] for name in run.states} <= set(groups["0.params"])


def test_torch_writes_a_file_of_a_checkpoint(run: Run, tmp_path: Path) -> None:
    dcp_to_torch_save(run.path, tmp_path / "both.pt")
    state = torch.load(tmp_path / "both.pt", weights_only=True)
    assert differing(state["model"], run.weights) == []
    Small().load_state_dict(state["model"])
    states = {f"{name}.{key}": value for name, entry in state["optim"]["state"].items() for key, value in entry.items()}
    assert differing(states, run.states) == []
    assert state["optim"]["param_groups"][0]["lr"] == 0.1
    dcp_to_torch_save(run.folder / "odd", tmp_path / "odd.pt")
    state = torch.load(tmp_path / "odd.pt", weights_only=True)
    seen, three = state["model"]["_extra_state"]["seen"]
    assert (seen.tolist(), three) == ([0, 1, 2], "three")


def test_what_a_file_cannot_hold_is_warned_about(run: Run, tmp_path: Path) -> None:
    odd, out = run.folder / "odd", tmp_path / "odd.safetensors"
    omission = "does not contain the ranks' own values of ignored parameters: model.own.weight"
    with pytest.warns(UserWarning, match="does not contain") as warned:
        *_, optimizer_file = tz.tools.consolidate(odd, out, optimizer=True)
    assert [str(warning.message).partition(";")[0] for warning in warned] == [
        f"odd.safetensors {omission}, optim.state.own.weight.momentum_buffer, optim.state.own.weight.step",
        "odd.safetensors does not contain _extra_state: safetensors files cannot hold extra states",
    ]
    numbers = json.loads(metadata_of(optimizer_file)["state"])
    assert numbers == {"layer.weight.step": STEPS, "layer.bias.step": STEPS}
    with pytest.warns(UserWarning, match="does not contain") as warned:
        tz.tools.consolidate(odd, out)
    assert str(warned[0].message).startswith(f"odd.safetensors {omission};")


def test_one_tensor_is_in_memory_at_a_time(run: Run, tmp_path: Path) -> None:
    references: list[weakref.ref[Tensor]] = []
    counts: list[int] = []
    read = OpenCheckpoint.read

    def read_and_count(self: OpenCheckpoint, key: str, dtype: torch.dtype) -> Tensor:
        counts.append(sum(reference() is not None for reference in references))
        value = read(self, key, dtype)
        references.append(weakref.ref(value))
        return value

    with mock.patch.object(OpenCheckpoint, "read", read_and_count):
        tz.tools.consolidate(run.path, tmp_path / "model.safetensors")
    assert len(counts) > 5
    assert max(counts) <= 1


def load(rank: int, world_size: int, path: Path, expected: dict[str, Tensor]) -> None:
    model = sharded(fresh(Small), 2)
    tz.load(path, model)
    assert differing(tz.full_state_dict(model), expected) == []


def test_a_safetensors_file_becomes_a_checkpoint(run: Run, ranks_pool: RanksPool, tmp_path: Path) -> None:
    (file,) = tz.tools.consolidate(run.path, tmp_path / "model.safetensors")
    assert tz.tools.shard_safetensors(file, tmp_path / "start", ranks=4) == tmp_path / "start"
    ranks_pool.run(2, load, tmp_path / "start", run.weights)


def test_the_command_inspects_and_consolidates(run: Run, tmp_path: Path) -> None:
    lines = output_of("inspect", run.folder / "latest", "--verify").splitlines()
    rows = [" ".join(line.replace("│", " ").split()) for line in lines]
    assert {"embed.weight 9 x 5 float32 180", "head.weight = embed.weight", "scale - float32 4"} <= set(rows)
    printed = " ".join(rows)
    assert f"step-2: saved by 3 ranks; {len(run.states)} tensors of an optimizer at step 2; 4 files" in printed
    tied = run.weights["head.weight"].nbytes
    nbytes = sum(tensor.nbytes for tensor in (*run.weights.values(), *run.states.values())) - tied
    assert f"its tensors have {nbytes:,} B" in printed
    of_odd = "2 tensors of an optimizer at step 2; 9 values of single ranks"
    assert of_odd in output_of("inspect", run.folder / "odd")
    out = tmp_path / "m.safetensors"
    printed = output_of("consolidate", run.path, out, "--dtype", "float16", "--optimizer")
    assert str(tmp_path / "m.optimizer.safetensors") in printed
    assert load_file(out)["row"].dtype is torch.float16
    code, _, err = run_command("consolidate", run.folder / "odd", tmp_path / "odd.safetensors")
    assert code == 0
    assert "thunder-zero: odd.safetensors does not contain the ranks' own values" in err
    (tmp_path / "cut").mkdir()
    for file in (".metadata", "manifest.json"):
        shutil.copy(run.path / file, tmp_path / "cut")
    assert ".distcp is missing" in refusal_of("inspect", tmp_path / "cut")  # the command checks before it prints


def test_wrong_arguments_are_refused(run: Run, tmp_path: Path) -> None:
    no, consolidate, shard = tmp_path / "no.safetensors", tz.tools.consolidate, tz.tools.shard_safetensors
    (file,) = consolidate(run.path, tmp_path / "model.safetensors")
    bare = shard(file, tmp_path / "bare")
    ending = "model.pt ends in '.pt'; pass a name that ends in .safetensors, or call torch's dcp_to_torch_save"
    fails(lambda: consolidate(run.path, tmp_path / "model.pt"), ending)
    fails(lambda: consolidate(run.path, no, dtype=torch.int8), "dtype is torch.int8; give a dtype of floating-point")
    fails(lambda: consolidate(bare, no, optimizer=True), "has no optimizer; consolidate without one")
    assert not no.exists()
    fails(lambda: shard(no, tmp_path / "no", ranks=0), "ranks is 0; pass the number of files")

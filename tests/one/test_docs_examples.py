"""docs/reference.md names every public name, and the programs of the pages run."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import thunder_zero as tz
from tests.harness.tiers import slow

import thunder

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE, LIGHTNING, START = DOCS / "reference.md", DOCS / "lightning.md", DOCS / "start.md"
TRAIN = [DOCS / f"{name}.md" for name in ("training", "optimizers", "checkpoints", "large-models")]


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


BLOCKS = [block for block in blocks(REFERENCE) if "lightning" not in block]
FABRIC = [block for document in (REFERENCE, LIGHTNING) for block in blocks(document) if "lightning.fabric" in block]


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_the_reference_shows_every_public_name_and_its_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(BLOCKS)
    assert [name for name in tz.__all__ if not re.search(rf"\btz\.{name}\b|\"{name.lower()}", program)] == []
    exec(compile(program, str(REFERENCE), "exec"), {"__name__": "reference"})
    printed = capsys.readouterr().out
    assert "zero_all_gather" in printed
    assert "is never waited for" in printed or "under way" in printed


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="torch names operators, and what they save")
def test_the_start_page_shows_the_output_of_its_programs(capsys: pytest.CaptureFixture[str]) -> None:
    section = START.read_text().partition("\n## Read a trace\n")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"torch": torch, "tz": tz}
    shown = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", section, flags=re.DOTALL)
    assert len(shown) == 2
    for program, output in shown:
        exec(compile(program, str(START), "exec"), names)
        _, _, lines = capsys.readouterr().out.partition("\n\n")  # without the explanation at its top
        assert lines == output


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_section_on_gradients_by_numbers_shows_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "check.md"
    section = page.read_text().partition("\n## Compare gradients by numbers\n")[2].partition("\n## ")[0]
    ((program, output),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", section, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, str(page), "exec"), names)
    assert capsys.readouterr().out == output
    _, fixed = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    exec(compile(fixed, str(page), "exec"), names)


@pytest.mark.slow
def test_the_forecast_of_the_memory_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    # Versions may differ in the peak and in names of values, but not in the bytes at rest.
    page = DOCS / "memory.md"
    program, fit = blocks(page)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(program, str(page), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("peak ")
    assert printed[-1] in page.read_text().splitlines(), "run python -m examples.bench.memory --no-rows"
    with torch.device("meta"):
        names["model"] = names["GPT"](
            names["GPTConfig"](blocks=1, width=64, heads=2, context=128)
        )  # a small model, which is fitted faster
    loss = lambda logits: F.cross_entropy(logits.flatten(0, 1), names["targets"].flatten())  # noqa: E731
    exec(compile(fit, str(page), "exec"), names | {"loss": loss})
    assert "<- chosen" in capsys.readouterr().out


@pytest.mark.usefixtures("group")
def test_the_note_on_tensors_runs() -> None:
    (program,) = blocks(DOCS / "notes.md")
    exec(compile(program, "notes.md", "exec"), {})


@pytest.mark.slow
def test_the_page_on_lengths_runs() -> None:
    train, fit = blocks(DOCS / "lengths.md")
    ran = subprocess.run([sys.executable, "-c", train], cwd=DOCS.parent, capture_output=True, text=True, timeout=300)
    assert re.search(r"graph 0  training  input_ids \(2, s\d+\) .* mismatch", ran.stdout), ran.stderr
    exec(compile(fit, "lengths.md", "exec"), {"__name__": "page"})


@pytest.mark.slow
def test_the_page_on_formats_begins_with_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(DOCS / "formats.md")[0])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(launch, cwd=DOCS.parent, check=True, timeout=300)


@pytest.mark.slow
def test_the_page_on_capture_runs() -> None:
    for block in blocks(DOCS / "capture.md"):
        subprocess.run([sys.executable, "-c", block], cwd=DOCS.parent, check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_the_pages_on_training_run(tmp_path: Path) -> None:
    # The blocks share a model, an input and a loss, which the reader has.
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model: Any = thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(stage=2)])
    torch.save(module.state_dict(), tmp_path / "model.pt")
    names = {"tz": tz, "torch": torch, "nn": nn, "thunder": thunder, "dist": dist, "init_device_mesh": init_device_mesh}
    names |= {"build": lambda: deepcopy(module), "path": tmp_path / "model.pt", "runs": tmp_path / "runs"}
    names |= {"model": model, "x": torch.ones(3, 4), "loss": lambda y: y.square().mean()}
    for page in TRAIN:
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)
    assert all(param.grad is not None for param in model.parameters())
    assert not any(tensor.is_meta for tensor in names["large"].parameters())
    for source in ("drawn", "read", "sent"):
        with torch.device("meta"):
            meta = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        thunder.jit(meta, transforms=[names[source]])(torch.ones(3, 4))
    assert (names["local"].ignored, names["small"].replicate_below_bytes) == (("router",), 4096)


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("block", [FABRIC[0], *slow(*FABRIC[1:])], ids=["reference", "lightning"])
@mock.patch.dict(os.environ)  # Fabric's launcher writes to the environment
def test_the_fabric_examples_run(block: str) -> None:
    names: dict[str, Any] = {"W": 1}
    exec(compile(BLOCKS[0], str(REFERENCE), "exec"), names)
    names["module"] = names["build"]()
    names["optimizer"] = torch.optim.SGD(names["module"].parameters(), lr=0.1)
    exec(compile(block, "the Fabric example", "exec"), names)
    names["model"](names["x"]).sum().backward()
    assert all(param.grad is not None for param in names["optimizer"].param_groups[0]["params"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs Lightning")
@pytest.mark.usefixtures("group")
@mock.patch.dict(os.environ)
def test_the_trainer_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.net(x).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)  # Lightning writes logs and checkpoints here
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # as under torchrun; the group exists
    (block,) = (block for block in blocks(LIGHTNING) if "lightning.pytorch" in block)
    rows: Any = torch.ones(4, 4)  # indexed by row, like a dataset
    names: dict[str, Any] = {"W": 1, "lightning_module": Lit(), "loader": DataLoader(rows, batch_size=2)}
    exec(compile(block, str(LIGHTNING), "exec"), names)
    assert names["trainer"].strategy.sharded.state.plan.policy.stage == 3


def test_without_lightning_an_error_says_what_to_install() -> None:
    missing = dict.fromkeys(("lightning", "lightning.fabric", "lightning.fabric.plugins"))
    with mock.patch.dict(sys.modules, missing):
        sys.modules.pop("thunder_zero.lightning", None)
        with pytest.raises(ModuleNotFoundError, match=r"needs Lightning .* run pip install -e '\.\[lightning\]'"):
            importlib.import_module("thunder_zero.lightning")

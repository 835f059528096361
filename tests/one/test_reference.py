"""docs/reference.md names every public name; what it and docs/features.md show runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thunder_zero as tz

import thunder

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE, FEATURES = DOCS / "reference.md", DOCS / "features.md"


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


BLOCKS = blocks(REFERENCE)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", tz.__all__)
def test_every_public_name_is_shown(name: str) -> None:
    assert any(re.search(rf"\btz\.{name}\b|\"{name.lower()}", block) for block in BLOCKS)


def test_the_examples_run(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile("\n".join(BLOCKS), str(REFERENCE), "exec"), {"__name__": "reference"})
    printed = capsys.readouterr().out
    assert "zero_all_gather" in printed
    assert "is never waited for" in printed or "under way" in printed


def test_the_features_run(alone: None, tmp_path: Path) -> None:
    """One after the other, with a model, an input and a loss of the reader's."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model: Any = thunder.jit(module, transforms=[tz.ZeroTransform(stage=2)])
    torch.save(module.state_dict(), tmp_path / "model.pt")
    names = {"tz": tz, "torch": torch, "nn": nn, "thunder": thunder, "path": tmp_path / "model.pt"}
    names |= {"model": model, "x": torch.ones(3, 4), "loss": lambda y: y.square().mean()}
    for block in blocks(FEATURES):
        exec(compile(block, str(FEATURES), "exec"), names)
    assert all(param.grad is not None for param in model.parameters())
    assert not any(tensor.is_meta for tensor in names["large"].parameters())
    for source in ("drawn", "read", "sent"):
        with torch.device("meta"):
            meta = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        thunder.jit(meta, transforms=[names[source]])(torch.ones(3, 4))
    assert (names["apart"].ignored, names["small"].keep_full_below_bytes) == (("router",), 4096)

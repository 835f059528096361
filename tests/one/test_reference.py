"""docs/reference.md names every public name; what it and docs/features.md show runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

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


def test_the_features_run(alone: None) -> None:
    """One after the other, with a model, an input and a loss of the reader's."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model: Any = thunder.jit(deepcopy(module), transforms=[tz.ZeroTransform(stage=2)])
    names = {"tz": tz, "model": model, "module": module, "x": torch.ones(3, 4), "torch": torch}
    names |= {"build": lambda: deepcopy(module), "init_device_mesh": init_device_mesh}
    names |= {"thunder": thunder, "loss": lambda y: y.square().mean()}
    for block in blocks(FEATURES):
        exec(compile(block, str(FEATURES), "exec"), names)
    assert all(param.grad is not None for param in model.parameters())
    assert (names["apart"].ignored, names["small"].keep_full_below_bytes) == (("router",), 4096)

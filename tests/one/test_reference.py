"""docs/reference.md names every public name, and what it shows runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import thunder_zero as tz

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
BLOCKS = re.findall(r"```python\n(.*?)```", REFERENCE.read_text(), flags=re.DOTALL)


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

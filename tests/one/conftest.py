"""What tests of one process share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.harness.one_rank import group_of_one


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A group of this process alone."""
    with group_of_one("cpu") as alone:
        yield alone


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same values in any order of tests, as on ranks of the pool."""
    torch.manual_seed(0)

"""A rank dies or hangs in the middle of a collective or a save: the others end in time, and name it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.death_worker import CASES, TIMEOUT_SECONDS

ROOT = Path(__file__).parents[2]
TIMED_OUT = f"Timed out waiting {TIMEOUT_SECONDS * 1000:.0f}ms"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What the ranks that live said in each case. The worker fails if one of them has not ended, process and all,
    within the group's time-out and ten seconds after the death."""
    command = [sys.executable, "-m", "tests.harness.death_worker", str(tmp_path_factory.mktemp("deaths"))]
    worker = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert worker.returncode == 0, worker.stderr
    errors: dict[str, dict[str, str]] = json.loads(worker.stdout.splitlines()[-1])
    return errors


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", CASES)
def test_the_others_end_and_name_the_rank_or_the_timeout(name: str, said: dict[str, dict[str, str]]) -> None:
    """A rank that notices later may have lost another one as well, which ended because of it."""
    assert set(said[name]) == {"0", "2"}
    for rank, sentence in said[name].items():
        other = 2 - int(rank)
        who = sentence.removeprefix(f"rank {rank} got no answer from ").partition(": it died")[0]
        later = f"one of ranks {sorted((1, other))}", *([f"rank {other}"] if name.startswith("hangs") else [])
        assert who == "rank 1" or who in later, sentence
    first = TIMED_OUT if name.startswith("hangs") else "from rank 1:"
    assert any(first in sentence for sentence in said[name].values()), said[name]
